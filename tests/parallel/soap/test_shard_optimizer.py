import pytest
import torch
from torch import nn

from perfsearch.parallel.soap.configuration import PlanError
from perfsearch.parallel.soap.row_updates import is_plain_descent
from perfsearch.parallel.soap.shard_optimizer import make_capturable, shard_optimizer

WHOLE = {"a": ((0, 4), (0, 3)), "b": ((0, 3),)}
HALF = {"a": ((0, 2), (0, 3)), "b": ((0, 3),)}


def parameters(stored):
    return {k: nn.Parameter(torch.ones([hi - lo for lo, hi in r])) for k, r in stored.items()}


class Lamb(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def test_optimizers_by_element_take_tiles():
    made = shard_optimizer(torch.optim.AdamW, parameters(HALF), WHOLE, HALF)
    assert [p.shape for p in made.param_groups[0]["params"]] == [(2, 3), (3,)]


def test_others_take_whole_parameters_only():
    assert isinstance(shard_optimizer(Lamb, parameters(WHOLE), WHOLE, WHOLE), Lamb)
    with pytest.raises(PlanError, match=r"Lamb may look at whole tensors.* less than all of a"):
        shard_optimizer(Lamb, parameters(HALF), WHOLE, HALF)
    only_a = {"a": WHOLE["a"]}
    with pytest.raises(PlanError, match="less than all of b"):
        shard_optimizer(Lamb, parameters(only_a), WHOLE, only_a)


def test_a_device_without_parameters_has_no_optimizer():
    assert shard_optimizer(torch.optim.SGD, {}, WHOLE, {}) is None
    frozen = {"b": nn.Parameter(torch.ones(3), requires_grad=False)}
    assert shard_optimizer(torch.optim.SGD, frozen, WHOLE, WHOLE) is None
    assert make_capturable(None)


def test_optimizers_are_made_capturable_where_they_can_be():
    held = list(parameters(WHOLE).values())
    adam = torch.optim.Adam(held)
    assert make_capturable(adam) and adam.param_groups[0]["capturable"] is True
    assert make_capturable(torch.optim.SGD(held, lr=0.1))
    assert not make_capturable(torch.optim.Adagrad(held))


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"lr": 0.1}, True),
        ({"lr": 0.1, "maximize": True}, True),
        ({"lr": 0.1, "momentum": 0.9}, False),
        ({"lr": 0.1, "weight_decay": 0.1}, False),
        ({"lr": torch.tensor(0.1)}, False),
    ],
)
def test_rows_are_updated_under_plain_descent_only(options, plain):
    held = list(parameters(WHOLE).values())
    assert is_plain_descent(torch.optim.SGD(held, **options)) is plain
    assert not is_plain_descent(torch.optim.Adam(held))
