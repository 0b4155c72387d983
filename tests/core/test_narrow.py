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
