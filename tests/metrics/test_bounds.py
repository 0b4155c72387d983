import math

import pytest

from perfsearch.metrics import bounds as module
from perfsearch.metrics.bounds import bound_of, bounds, gain_of, touched
from perfsearch.search.knob import Kind, Knob
from perfsearch.search.trial import Measurement

BUCKET = Knob("bucket_cap_mb", Kind.ORDINAL, 25, (8, 25))
WORKERS = Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1))
ONE_CHOICE = Knob("compile_mode", Kind.CATEGORICAL, "none", ("none",))
UNKNOWN = Knob("shiny", Kind.BOOLEAN, False)


def job(phases=None, evidence=None, **changes):
    """A step of 100 ms that was looked at closely."""
    return Measurement(
        [0.1] * 10,
        32,
        phases_ms={"forward": 30.0, "backward": 40.0, "optimizer": 10.0, **(phases or {})},
        bottleneck_evidence={
            "with_everything_ms": 100.0,
            "detailed_step_ms": 100.0,
            **(evidence or {}),
        },
        **changes,
    )


def share(measurement, part):
    return next(b.share for b in bounds(measurement) if b.part == part)


def test_nothing_is_bounded_without_a_close_look():
    light = Measurement([0.1], 1, phases_ms={"forward": 1.0})
    assert bounds(light) == []
    assert bound_of([], [BUCKET]) is None


def test_leaving_a_part_out_counts_where_it_saves_more_than_its_phase():
    measurement = job(
        {"comm_exposed": 5.0},
        {
            "without_communication_ms": 88.0,
            "without_communication_error_ms": 0.4,
            "with_everything_error_ms": 0.3,
        },
    )
    assert share(measurement, "communication") == pytest.approx((12.0 + 2 * 0.5) / 100)


def test_a_phase_counts_where_leaving_it_out_saves_less():
    measurement = job({"dataloader_next": 6.0}, {"without_loading_ms": 99.0})
    assert share(measurement, "loading") == pytest.approx(0.06)


def test_communication_that_cannot_be_seen_is_not_bounded():
    assert share(job(), "communication") == 1.0
    assert math.isinf(bound_of(bounds(job()), [BUCKET]))


def test_computing_is_bounded_by_the_peak():
    peak = {"peak_flops_per_s": 1e12, "precision": "bf16"}
    measurement = job(flops_per_step=2 * 50e9, world_size=2, environment=peak)
    assert share(measurement, "computing") == pytest.approx((70.0 - 50.0) / 100)


def test_bounds_come_largest_first_and_add_up_over_the_searched_parts():
    measurement = job({"comm_exposed": 4.0, "dataloader_next": 16.0})
    found = bounds(measurement)
    assert [b.part for b in found] == sorted(
        (b.part for b in found), key=lambda part: -share(measurement, part)
    )
    assert bound_of(found, [BUCKET]) == pytest.approx(0.04 / 0.96)
    assert bound_of(found, [BUCKET, WORKERS]) == pytest.approx(0.2 / 0.8)
    assert bound_of(found, [ONE_CHOICE, BUCKET]) == pytest.approx(0.04 / 0.96)
    assert math.isinf(bound_of(found, [UNKNOWN]))


def test_the_whole_step_bounds_nothing():
    assert math.isinf(gain_of(1.0))
    assert gain_of(0.5) == 1.0


def test_every_knob_of_the_runners_is_placed():
    from perfsearch.runners._ddp_knobs import EFFECT_ORDER as ddp
    from perfsearch.runners._zero_knobs import EFFECT_ORDER as zero

    free = {name for name in {*ddp, *zero} if touched(name) == module.PARTS}
    assert free == {"omp_num_threads", "gradient_accumulation"}
