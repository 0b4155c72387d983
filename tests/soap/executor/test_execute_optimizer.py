import pytest
import torch
from torch import nn

from perfsearch.soap.executor.execute import make_capturable, shard_optimizer
from perfsearch.soap.executor.passes import is_plain_descent
from perfsearch.soap.plan import PlanError

WHOLE = {"a": ((0, 4), (0, 3)), "b": ((0, 3),)}
HALF = {"a": ((0, 2), (0, 3)), "b": ((0, 3),)}


def parameters(stored):
    return {k: nn.Parameter(torch.ones([hi - lo for lo, hi in r])) for k, r in stored.items()}


def model(shapes=WHOLE):
    return parameters(shapes)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def test_optimizers_by_element_take_tiles():
    made = shard_optimizer(torch.optim.AdamW, parameters(HALF), WHOLE, HALF, model())
    assert [p.shape for p in made.param_groups[0]["params"]] == [(2, 3), (3,)]


def test_others_take_whole_parameters_only():
    assert isinstance(shard_optimizer(Lamb, parameters(WHOLE), WHOLE, WHOLE, model()), Lamb)
    with pytest.raises(PlanError, match=r"Lamb may look at whole tensors.* less than all of a"):
        shard_optimizer(Lamb, parameters(HALF), WHOLE, HALF, model())
    only_a = {"a": WHOLE["a"]}
    with pytest.raises(PlanError, match="less than all of b"):
        shard_optimizer(Lamb, parameters(only_a), WHOLE, only_a, model())


def grouped(tensors):
    """As users do: no decay of what has one dimension; another rate of what comes last."""
    tensors = list(tensors)
    return torch.optim.AdamW(
        [
            {"params": [t for t in tensors[:-1] if t.ndim > 1 and t.numel() > 10]},
            {"params": [t for t in tensors[:-1] if t.ndim == 1], "weight_decay": 0.0},
            {"params": tensors[-1:], "lr": 0.5},
        ],
        lr=0.1,
    )


def test_groups_are_those_of_the_model_not_of_the_tiles():
    shapes = {"a": ((0, 4), (0, 3)), "b": ((0, 4),), "c": ((0, 2), (0, 2))}
    viewed = {**shapes, "b": ((0, 2), (0, 2))}
    held = {"a": ((0, 1), (0, 3)), "b": ((1, 2), (0, 2))}
    tiles = parameters(held)
    made = shard_optimizer(grouped, tiles, viewed, held, model(shapes))
    groups = [(g["params"][0], g["weight_decay"], g["lr"]) for g in made.param_groups]
    assert groups == [(tiles["a"], 0.01, 0.1), (tiles["b"], 0.0, 0.1)]
    made.step()  # and of c, which is elsewhere, nothing is left


def test_state_that_is_there_from_the_start_is_cut_like_its_parameter():
    whole = {"a": ((0, 4), (0, 3))}
    half = {"a": ((2, 4), (0, 3))}
    tiles = parameters(half)

    def adagrad(tensors):
        return torch.optim.Adagrad(tensors, lr=0.1, initial_accumulator_value=2.0)

    made = shard_optimizer(adagrad, tiles, whole, half, model(whole))
    assert list(made.state) == [tiles["a"]]
    assert torch.equal(made.state[tiles["a"]]["sum"], torch.full((2, 3), 2.0))
    tiles["a"].grad = torch.ones(2, 3)
    made.step()
    assert (tiles["a"] < 1).all()


def clipped(tensors):
    made = torch.optim.SGD(tensors, lr=0.1)
    made.register_step_pre_hook(lambda *_: None)
    return made


def test_hooks_on_a_step_need_whole_parameters():
    assert shard_optimizer(clipped, parameters(WHOLE), WHOLE, WHOLE, model())
    with pytest.raises(PlanError, match=r"SGD has hooks on its step.*less than all of a"):
        shard_optimizer(clipped, parameters(HALF), WHOLE, HALF, model())


def test_views_are_not_shown_to_optimizers_that_look_at_tensors():
    viewed = {**WHOLE, "a": ((0, 2), (0, 2), (0, 3))}
    with pytest.raises(PlanError, match=r"Lamb may look at whole tensors.*a view of a"):
        shard_optimizer(Lamb, parameters(viewed), viewed, viewed, model())


def test_parameters_that_are_not_the_models_are_refused():
    def own(tensors):
        return torch.optim.SGD([nn.Parameter(torch.ones(2)), *tensors], lr=0.1)

    with pytest.raises(PlanError, match="none of the model's"):
        shard_optimizer(own, parameters(HALF), WHOLE, HALF, model())


def test_a_device_without_parameters_has_no_optimizer():
    assert shard_optimizer(torch.optim.SGD, {}, WHOLE, {}, model()) is None
    frozen = {"b": nn.Parameter(torch.ones(3), requires_grad=False)}
    assert shard_optimizer(torch.optim.SGD, frozen, WHOLE, WHOLE, model()) is None
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
