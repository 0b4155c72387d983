from __future__ import annotations

import pytest
from support.strategy_spaces import drive, endless_space, make, mixed_space

from perfsearch.core.space import key_of


def test_follows_the_order_of_the_space() -> None:
    space = mixed_space()
    assert drive(make("grid", space), 7) == (space.listed() or [])[:7]


def test_an_endless_space_gets_a_lattice_with_both_ends() -> None:
    strategy = make("grid", endless_space(), 0, points_per_knob=3)
    seen = drive(strategy, 100)
    rates = sorted({float(p["rate"] or 0) for p in seen})
    assert rates == pytest.approx([1e-3, 0.1, 10.0])
    assert {p["size"] for p in seen} == {1, 1024, 1 << 20}
    assert len({key_of(p) for p in seen}) == len(seen) == 24  # 27 less those above the limit
    assert strategy.stop_reason == "grid exhausted"
