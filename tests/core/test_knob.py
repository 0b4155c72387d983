import math

import pytest

from perfsearch.core.knob import Kind, Knob, same_value


def test_log_range_positions_are_equal_ratios() -> None:
    knob = Knob("bucket_cap_mb", Kind.REAL, 25.0, low=1, high=256, log=True)
    assert knob.unit_position(16) == pytest.approx(0.5)
    assert knob.from_unit(0.5) == pytest.approx(16)
    assert knob.choices() is None


def test_integer_range_lists_its_choices() -> None:
    assert Knob("threads", Kind.INTEGER, 1, low=1, high=4).choices() == (1, 2, 3, 4)


def test_log_steps_multiply() -> None:
    knob = Knob("micro_batch", Kind.INTEGER, 1, low=1, high=16, log=True, step=2)
    assert knob.choices() == (1, 2, 4, 8, 16)


def test_positive_ordinals_go_by_logarithm_and_others_by_place() -> None:
    powers = Knob("nccl_nsocks", Kind.ORDINAL, 1, values=(1, 2, 4))
    assert powers.unit_position(2) == pytest.approx(0.5)
    stages = Knob("zero_stage", Kind.ORDINAL, 0, values=(0, 1, 2, 3))
    assert stages.unit_position(1) == pytest.approx(1 / 3)


def test_contains_tells_types_apart() -> None:
    assert not Knob("view", Kind.BOOLEAN, False).contains(1)
    assert not Knob("threads", Kind.INTEGER, 1, low=1, high=4).contains(True)
    assert not Knob("threads", Kind.INTEGER, 1, low=1, high=4).contains(2.5)
    assert not same_value(True, 1)
    assert same_value(1, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": Kind.REAL},
        {"kind": Kind.REAL, "low": 3, "high": 1},
        {"kind": Kind.REAL, "low": 0, "high": 1, "log": True},
        {"kind": Kind.CATEGORICAL},
    ],
)
def test_impossible_knobs_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="knob broken"):
        Knob("broken", default=1, **arguments)


def test_long_ranges_are_drawn_on_their_grid() -> None:
    """Those of too many values to list them for it."""
    fine = Knob("fine", Kind.REAL, 1.0, low=1.0, high=512.0, step=0.05)
    assert fine.count is not None and fine.count > 4096
    for position in (0.0, 0.1234, 0.5, 1.0):
        places = (float(fine.from_unit(position)) - 1.0) / 0.05
        assert places == pytest.approx(round(places), abs=1e-6)
    geometric = Knob("g", Kind.REAL, 1.0, low=1.0, high=1e6, log=True, step=1.001)
    assert geometric.count is not None and geometric.count > 4096
    places = math.log(float(geometric.from_unit(0.37))) / math.log(1.001)
    assert places == pytest.approx(round(places), abs=1e-6)


@pytest.mark.parametrize(
    "knob",
    [
        Knob("a", Kind.INTEGER, 25, low=1, high=512, log=True),
        Knob("b", Kind.INTEGER, 3, low=0, high=40),
        Knob("c", Kind.ORDINAL, 1, (1, 2, 4, 8, 64)),
        Knob("d", Kind.ORDINAL, 0, (0, 1, 2, 4, 8)),
        Knob("e", Kind.ORDINAL, 3, (3,)),
    ],
)
def test_a_position_stands_for_the_nearest_choice(knob: Knob) -> None:
    choices = knob.choices() or ()
    for place in range(1001):
        position = place / 1000
        away = [abs(knob.unit_position(choice) - position) for choice in choices]
        assert knob.from_unit(position) == choices[away.index(min(away))]


@pytest.mark.parametrize(
    "knob",
    [
        Knob("grid", Kind.REAL, 0.0, low=0.0, high=0.3, step=0.1),
        Knob("log", Kind.REAL, 0.1, low=0.1, high=0.7, log=True),
        Knob("geometric", Kind.REAL, 0.1, low=0.1, high=0.1 * 1.1**7, log=True, step=1.1),
    ],
)
def test_rounding_leads_to_no_value_outside_of_a_range(knob: Knob) -> None:
    values = [knob.from_unit(place / 1000) for place in range(1001)]
    assert all(knob.contains(value) for value in (*values, *(knob.choices() or ())))
