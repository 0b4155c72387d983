from dataclasses import replace

import pytest

from perfsearch.core.knob import Kind, Knob, Numerics
from perfsearch.core.narrow import KnobError, narrow

BUCKET = Knob("bucket_cap_mb", Kind.REAL, 25.0, low=1, high=512, log=True, unit="MiB")
VIEW = Knob("gradient_as_bucket_view", Kind.BOOLEAN, False)
SOCKETS = Knob("sockets", Kind.ORDINAL, None, values=(1, 2, 4))
COMPILE = Knob(
    "compile_mode",
    Kind.CATEGORICAL,
    "none",
    values=("none", "default"),
    numerics=Numerics.ALTERING,
)
CHUNK = Knob("chunk", Kind.ORDINAL, 1, values=(1, 2), when={"gradient_as_bucket_view": (True,)})
DECLARED = [BUCKET, VIEW, SOCKETS, COMPILE, CHUNK]
ALL = {"bucket_cap_mb": "search", "gradient_as_bucket_view": "search", "sockets": "search"}


def go(**settings: object):
    searched, pinned = narrow(DECLARED, settings, Numerics.REORDERED)
    return {k.name: k for k in searched}, pinned


def test_search_scalar_list_range_null_and_dropped() -> None:
    searched, pinned = go(
        bucket_cap_mb=[64, 8, 25], gradient_as_bucket_view=True, sockets={"min": 2}
    )
    assert searched["bucket_cap_mb"].values == (8, 25, 64)
    assert searched["bucket_cap_mb"].kind is Kind.ORDINAL
    assert searched["sockets"].values == (2, 4)
    assert pinned == {"gradient_as_bucket_view": True, "compile_mode": "none", "chunk": 1}
    searched, pinned = go(bucket_cap_mb={"min": 4, "max": 64}, sockets=None)
    assert (searched["bucket_cap_mb"].low, searched["bucket_cap_mb"].log) == (4, True)
    assert pinned["sockets"] is None


def test_a_null_among_choices_makes_a_category() -> None:
    searched, _ = go(sockets=[None, 2, 4])
    assert searched["sockets"].kind is Kind.CATEGORICAL
    assert searched["sockets"].values == (None, 2, 4)


def test_a_range_of_listed_values_leaves_a_null_among_them_out() -> None:
    unset = Knob("sockets", Kind.ORDINAL, None, values=(None, 1, 2, 4))
    searched, _ = narrow([unset], {"sockets": {"min": 2}}, Numerics.REORDERED)
    assert searched[0].values == (2, 4)


def test_conditions_on_pinned_knobs_are_settled() -> None:
    searched, _ = go(gradient_as_bucket_view=True, chunk="search")
    assert searched["chunk"].when == {}
    searched, pinned = go(gradient_as_bucket_view=False, chunk="search")
    assert "chunk" not in searched
    assert pinned["chunk"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap": 3}, "runner.knobs.bucket_cap: no such knob. Did you mean 'bucket_cap_mb'"),
        ({"bucket_cap_mb": 4096}, "runner.knobs.bucket_cap_mb=4096: allowed is 1 to 512 MiB"),
        ({"bucket_cap_mb": "big"}, "runner.knobs.bucket_cap_mb=big"),
        ({"bucket_cap_mb": {"minimum": 1}}, "runner.knobs.bucket_cap_mb.minimum: unknown"),
        (
            {"bucket_cap_mb": {"min": 2, "max": 1}},
            "bucket_cap_mb={min: 2, max: 1}: min is above max. allowed is 1 to 512 MiB",
        ),
        ({"bucket_cap_mb": {"min": None}}, "bucket_cap_mb={min: null}: min is no number. allowed"),
        ({"bucket_cap_mb": {"min": 0.5}}, "bucket_cap_mb=0.5: allowed is 1 to 512 MiB"),
        ({"sockets": {"min": 3, "max": 3}}, "sockets={min: 3, max: 3}: no value lies between 3"),
        ({"sockets": {"max": "two"}}, "sockets={max: two}: max is no number. allowed: 1, 2, 4"),
        ({"bucket_cap_mb": []}, "at least one choice"),
        ({"sockets": [3, 9]}, "runner.knobs.sockets=9"),
        ({"gradient_as_bucket_view": {"min": 0}}, "it has no range"),
        ({"compile_mode": "search"}, "Set numerics=altering to search it"),
    ],
)
def test_errors_name_key_value_and_remedy(settings: dict, message: str) -> None:
    with pytest.raises(KnobError) as caught:
        narrow(DECLARED, settings, Numerics.REORDERED)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap_mb": {"step": "abc"}}, "bucket_cap_mb={step: abc}: step is no number"),
        ({"bucket_cap_mb": {"min": float("nan")}}, "{min: nan}: min is no number"),
        ({"bucket_cap_mb": {"max": float("inf")}}, "{max: inf}: max is no number"),
        ({"bucket_cap_mb": {"step": -1}}, "step is not above 0"),
        ({"bucket_cap_mb": {"step": 0}}, "step is not above 0"),
        ({"bucket_cap_mb": {"step": 1e-9}}, "more than 100,000 values. Give a larger step"),
        ({"bucket_cap_mb": {"min": 10**400}}, "allowed is 1 to 512 MiB"),
        ({"bucket_cap_mb": {"log": "false"}}, "log is true or false"),
        ({"sockets": {"step": 2}}, "step has no effect, as only listed values are tried"),
        ({"sockets": {"min": 1, "log": True}}, "log has no effect, as only listed values"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan: allowed is 1 to 512 MiB"),
        ({"chunk": True}, "runner.knobs.chunk=true: allowed: 1, 2"),
    ],
)
def test_odd_ranges_and_values_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(KnobError) as caught:
        narrow(DECLARED, settings, Numerics.REORDERED)
    assert message in str(caught.value)


def test_a_step_of_whole_numbers_is_whole() -> None:
    many = Knob("many", Kind.INTEGER, 4, low=1, high=64)
    (kept,), _ = narrow([many], {"many": {"min": 4, "step": 4}}, Numerics.EXACT)
    assert kept.choices() == tuple(range(4, 65, 4))
    for setting in ({"step": 0.5}, {"min": 1.5}):
        with pytest.raises(KnobError, match="many"):
            narrow([many], {"many": setting}, Numerics.EXACT)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"bucket_cap_mb": [8, 25, 8]}, (8, 25)),
        ({"bucket_cap_mb": [8, 8.0, 64]}, (8, 64)),
        ({"gradient_as_bucket_view": [True, False, True]}, (True, False)),
        ({"sockets": [None, 2, None, 2]}, (None, 2)),
    ],
)
def test_a_choice_that_stands_twice_is_one(asked: dict, kept: tuple) -> None:
    (name,) = asked
    assert go(**asked)[0][name].values == kept


def test_what_is_in_force_today_can_be_pinned_wherever_it_lies() -> None:
    far = replace(BUCKET, default=600.0)
    unlisted = replace(SOCKETS, default=9)
    asked = {"bucket_cap_mb": 600, "sockets": 9}
    assert narrow([far, unlisted], asked, Numerics.EXACT) == ([], asked)
    for odd in ({"bucket_cap_mb": 601}, {"sockets": 8}, {"sockets": True}):
        with pytest.raises(KnobError, match="allowed"):
            narrow([far, unlisted], odd, Numerics.EXACT)
