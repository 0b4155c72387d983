import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfsearch.instrument import operators
from perfsearch.instrument.operators import Operators

IMAGES = torch.ones(1, 3, 8, 8)
WORDS = torch.ones(2, 4, 16, 8, requires_grad=True)


def attend(**more):
    return functional.scaled_dot_product_attention(WORDS, WORDS, WORDS, **more).sum()


def plain():
    return nn.Linear(8, 1)(torch.ones(2, 8)).sum()


def seen_in(*roots):
    found = Operators()
    found.backward(roots)
    return found


@pytest.mark.parametrize(
    ("root", "convolutional", "attention"),
    [
        (plain, False, []),
        (lambda: nn.Conv2d(3, 4, 3)(IMAGES).sum(), True, []),
        (lambda: functional.conv1d(WORDS[0], torch.ones(2, 16, 3)).sum(), True, []),
        (attend, False, ["flash"]),
        (lambda: attend(dropout_p=0.1), False, []),  # no fused kernel of a CPU draws
        (lambda: checkpoint(plain_of, WORDS, use_reentrant=True), None, None),
        (lambda: checkpoint(plain_of, WORDS, use_reentrant=False), False, []),
    ],
)
def test_the_graph_of_the_backward_pass_says_what_computes_it(root, convolutional, attention):
    found = seen_in(root())
    assert (found.convolutional, found.attention) == (convolutional, attention)


def plain_of(inputs):
    return inputs.square().sum()


def test_every_root_is_looked_at():
    assert seen_in(plain(), nn.Conv1d(3, 4, 3)(torch.ones(1, 3, 8)).sum()).convolutional


def test_before_a_backward_pass_nothing_is_known():
    found = Operators()
    assert found.convolutional is None and found.attention is None


def test_a_change_is_looked_at_anew_and_later_steps_are_not():
    found = seen_in(attend())
    found.end_step()
    found.look_again()
    found.backward([plain()])
    assert found.attention == []
    found.end_step()
    found.backward([attend()])
    assert found.attention == []
    found.look_again()
    found.backward([attend()])
    assert found.attention == ["flash"]


def test_a_graph_that_is_too_large_is_not_known(monkeypatch):
    monkeypatch.setattr(operators, "_MOST_NODES", 3)
    deep = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    assert seen_in(deep(torch.ones(2, 8)).sum()).convolutional is None
