from __future__ import annotations

from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Kind, Knob
from perfsearch.core.space import Space
from perfsearch.strategies.bayes import Bayes
from perfsearch.strategies.fast import largest_fit

SPACE = Space(
    [
        Knob("zero_stage", Kind.ORDINAL, 0, (0, 1, 2)),
        Knob("micro_batch", Kind.ORDINAL, 1, (1, 2, 4, 8)),
        Knob("fused", Kind.BOOLEAN, False),
    ]
)
BASE = {"zero_stage": 0, "micro_batch": 1, "fused": True}


def peak(configuration: Configuration) -> Prediction:
    """Stage 0 fits up to 1, stage 1 up to 4, stage 2 up to 8."""
    batch, stage = int(configuration["micro_batch"] or 0), int(configuration["zero_stage"] or 0)
    return Prediction(peak_gib=batch + {0: 8.0, 1: 5.0, 2: 1.0}[stage])


def hints(limit_gib: float | None = 9.5) -> Hints:
    return Hints(
        dict(BASE),
        monotonic={"micro_batch": 1},
        stage_knob="zero_stage",
        memory_limit_gib=limit_gib,
        predict=peak,
    )


def test_the_largest_that_is_predicted_to_fit_in_each_stage() -> None:
    found = [largest_fit(SPACE, hints(), BASE, stage) for stage in (0, 1, 2)]
    assert [p and p["micro_batch"] for p in found] == [1, 4, 8]
    assert all(p and p["fused"] for p in found)


def test_nothing_where_not_even_the_least_fits_or_no_limit_is_known() -> None:
    assert largest_fit(SPACE, hints(2.5), BASE, 1) is None
    assert largest_fit(SPACE, hints(None), BASE, 1) is None


def test_bayes_begins_with_them_in_the_order_of_stages() -> None:
    strategy = Bayes(SPACE, hints(), 0)
    asked = [strategy.ask() for _ in range(3)]
    assert asked == [
        {**BASE, "zero_stage": s, "micro_batch": b} for s, b in ((0, 1), (1, 4), (2, 8))
    ]
