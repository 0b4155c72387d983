from __future__ import annotations

import pytest
from support.strategy_spaces import (
    baseline_of,
    cost_of,
    drive,
    ended,
    endless_space,
    make,
    mixed_space,
)

from perfsearch.core.space import key_of
from perfsearch.strategies.nevergrad import ALLOWED, REFUSED, Nevergrad

pytest.importorskip("nevergrad")


@pytest.mark.parametrize("optimizer", ALLOWED)
def test_every_allowed_optimizer_runs_sixty_trials(optimizer: str) -> None:
    """facebookresearch/nevergrad#1612: what is allowed runs on the installed numpy."""
    space = endless_space()
    strategy = make("nevergrad", space, 0, optimizer=optimizer)
    strategy.tell(ended(0, baseline_of(space), cost_of(space, baseline_of(space))))
    numbers = iter(range(100))
    seen = drive(strategy, 60, lambda p: None if next(numbers) % 7 == 3 else cost_of(space, p))
    assert len(seen) == 60
    assert all(space.feasible(p) for p in seen)
    assert len({key_of(p) for p in seen}) == 60


@pytest.mark.parametrize("optimizer", ["TwoPointsDE", "NGOpt", "PortfolioDiscreteOnePlusOne"])
def test_sixteen_outstanding_asks_are_bounded_and_distinct(optimizer: str) -> None:
    """facebookresearch/nevergrad#1506: many asks without a tell come to an end."""
    strategy = make("nevergrad", mixed_space(), 0, optimizer=optimizer)
    points = [strategy.ask() for _ in range(16)]
    assert len({key_of(p) for p in points if p is not None}) == 16


@pytest.mark.parametrize("optimizer", sorted(REFUSED))
def test_broken_ones_are_refused_with_the_reason(optimizer: str) -> None:
    with pytest.raises(ValueError) as caught:
        Nevergrad.Options(optimizer=optimizer)
    assert f"strategy.optimizer={optimizer}" in str(caught.value)
    assert REFUSED[optimizer] in str(caught.value)


def test_unknown_ones_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'TwoPointsDE'"):
        Nevergrad.Options(optimizer="TwoPointDE")
