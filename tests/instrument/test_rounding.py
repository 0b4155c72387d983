"""Weights that are changed by as little as rounding does."""

import copy

import pytest
import torch
from torch import nn

from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.rounding import Rounding


@pytest.fixture
def optimizers():
    made = Optimizers({})
    yield made
    made.undo()


@pytest.fixture
def whole_autocast(monkeypatch):
    """``autocast`` as it was, afterwards."""
    monkeypatch.setattr(torch.autocast, "__enter__", torch.autocast.__enter__)


def stepped(model, optimizers, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(inputs).sum().backward()
    optimizer.step()
    return optimizer


def largest_change(model, before):
    pairs = zip(model.parameters(), before, strict=True)
    return max(float(((a.detach() - b).abs() / b.abs()).max()) for a, b in pairs)


@pytest.mark.usefixtures("whole_autocast")
@pytest.mark.parametrize(
    ("dtype", "autocast", "step"),
    [
        (torch.float32, False, 2.0**-24),
        (torch.bfloat16, False, 2.0**-8),
        (torch.float32, True, 2.0**-8),  # multiplied in bfloat16
    ],
)
def test_each_weight_is_changed_by_what_its_type_rounds(optimizers, dtype, autocast, step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)
    rounding = Rounding(optimizers)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        optimizer = stepped(model, optimizers, torch.randn(2, 8, dtype=dtype))
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    rounding.perturb()
    assert 0 < largest_change(model, before) < 10 * step
    assert torch.equal(torch.get_rng_state(), state), "the script draws what it would have drawn"
    del optimizer
    again = stepped(twin, optimizers, torch.randn(2, 8, dtype=dtype))
    rounding.perturb()
    del again
    same = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same), "another rank's copy is changed alike"


def test_types_are_looked_for_until_the_look_is_ended(optimizers):
    entered = torch.autocast.__enter__
    rounding = Rounding(optimizers)
    assert torch.autocast.__enter__ is not entered
    rounding.end_watch()
    assert torch.autocast.__enter__ is entered
