import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Constraint, Space, key_of

BUCKET = Knob("bucket_cap_mb", Kind.REAL, 25.0, low=1, high=256, log=True)
VIEW = Knob("view", Kind.BOOLEAN, False)
SOCKETS = Knob("sockets", Kind.ORDINAL, 1, values=(1, 2, 4, 8))
ALGORITHM = Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring", "Tree"))
PROTOCOL = Knob(
    "protocol", Kind.CATEGORICAL, None, values=(None, "LL", "Simple"), when={"algorithm": ("Ring",)}
)
PAIR = Constraint("product", lambda c: not (c["sockets"] == 8 and c["view"]), "8 needs view off")
FINITE = Space([VIEW, SOCKETS, ALGORITHM, PROTOCOL], [PAIR])


def test_enumeration_is_feasible_and_without_repeats() -> None:
    listed = FINITE.listed()
    assert listed is not None
    assert FINITE.size == len({key_of(p) for p in listed}) == (2 * 4 - 1) * (2 + 3)
    assert all(FINITE.feasible(p) for p in listed)


def test_a_knob_that_does_not_matter_is_held_at_its_default() -> None:
    point = {"view": True, "sockets": 1, "algorithm": "Tree", "protocol": "LL"}
    assert FINITE.canonical(point)["protocol"] is None


@given(seed=st.integers(0, 10_000))
def test_samples_and_neighbours_are_feasible(seed: int) -> None:
    space = Space([BUCKET, VIEW, SOCKETS], [PAIR])
    assert space.size is None
    point = space.sample(np.random.default_rng(seed))
    assert space.feasible(point)
    neighbours = space.neighbours(point)
    assert neighbours
    for neighbour in neighbours:
        assert space.feasible(neighbour)
        assert sum(neighbour[k] != point[k] for k in point) == 1


def test_an_empty_space_says_so() -> None:
    space = Space([VIEW], [Constraint("never", lambda c: False)])
    with pytest.raises(LookupError, match="no configuration"):
        space.sample(np.random.default_rng(0))


def test_violations_name_knob_and_rule() -> None:
    point = {"view": True, "sockets": 8, "algorithm": None, "protocol": None}
    assert FINITE.violations(point) == ["8 needs view off"]
    assert "sockets=3" in FINITE.violations({**point, "sockets": 3})[0]
    assert FINITE.violations({"view": True}) == [
        "sockets is missing",
        "algorithm is missing",
        "protocol is missing",
    ]


def test_explicit_points_are_the_whole_space() -> None:
    points = [{"view": True, "sockets": 1}, {"view": False, "sockets": 8}]
    space = Space([VIEW, SOCKETS], points=points)
    assert space.size == 2
    assert not space.feasible({"view": False, "sockets": 1})
    assert space.neighbours(points[0]) == []


def test_encoding_has_a_column_a_knob() -> None:
    rows = FINITE.encode(FINITE.listed() or [])
    assert rows.shape == (FINITE.size, 4)
    assert rows.min() >= 0
    assert rows.max() <= 1
    assert FINITE.ordered_columns.tolist() == [False, True, False, False]


def test_key_tells_true_from_one_but_not_one_from_one_point_zero() -> None:
    assert key_of({"a": 1}) == key_of({"a": 1.0})
    assert key_of({"a": 1}) != key_of({"a": True})
