import math
from dataclasses import replace

import pytest

from perfsearch.core.knob import Kind, Knob, Part
from perfsearch.core.trial import Measurement
from perfsearch.knobs import by_name, effect_order
from perfsearch.knobs.base import Use
from perfsearch.metrics.bounds import affected_parts, gain_of, headroom_of, in_short, upper_bounds

BUCKET = by_name["bucket_cap_mb"].knob
WORKERS = by_name["dataloader_workers"].knob
ONE_CHOICE = replace(by_name["compile_mode"].knob, values=("none",))
UNKNOWN = Knob("shiny", Kind.BOOLEAN, False)


def job(phases=None, evidence=None, **changes):
    """A step of 100 ms that was profiled."""
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
    return next(b.share for b in upper_bounds(measurement) if b.part == part)


def test_nothing_is_bounded_without_a_close_look():
    light = Measurement([0.1], 1, phases_ms={"forward": 1.0})
    assert upper_bounds(light) == []
    assert headroom_of([], [BUCKET]) is None


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
    two = job(world_size=2)
    assert share(two, "communication") == 1.0
    assert math.isinf(headroom_of(upper_bounds(two), [BUCKET]))


def test_one_rank_alone_does_not_communicate():
    assert share(job(), "communication") == 0.0
    assert share(job({"comm_exposed": 5.0}), "communication") == pytest.approx(0.05)  # buckets
    assert share(job(in_force={"zero_stage": 3}), "communication") == 1.0


def test_computing_is_bounded_by_the_peak():
    peak = {"peak_flops_per_s": 1e12, "precision": "bf16"}
    measurement = job(flops_per_step=2 * 50e9, world_size=2, environment=peak)
    assert share(measurement, "computing") == pytest.approx((70.0 - 50.0) / 100)


def test_bounds_come_largest_first_and_add_up_over_the_searched_parts():
    measurement = job({"comm_exposed": 4.0, "dataloader_next": 16.0})
    found = upper_bounds(measurement)
    assert [b.part for b in found] == sorted(
        (b.part for b in found), key=lambda part: -share(measurement, part)
    )
    assert headroom_of(found, [BUCKET]) == pytest.approx(0.04 / 0.96)
    assert headroom_of(found, [BUCKET, WORKERS]) == pytest.approx(0.2 / 0.8)
    assert headroom_of(found, [ONE_CHOICE, BUCKET]) == pytest.approx(0.04 / 0.96)
    assert math.isinf(headroom_of(found, [UNKNOWN]))


def host_limited(parts):
    """What a close look sees of a step whose parts take these milliseconds of host and device."""
    step_ms, phases = steady(parts)
    names = ("dataloader_next", "forward", "backward", "optimizer")
    return step_ms, Measurement(
        [step_ms / 1e3],
        32,
        phases_ms=dict(zip(names, phases, strict=True)),
        bottleneck_evidence={
            "with_everything_ms": step_ms,
            "detailed_step_ms": step_ms,
            "device_busy_ms": float(sum(device for _, device in parts)),
            "without_loading_ms": steady(((0, 0), *parts[1:]))[0],
        },
    )


def steady(parts, steps=200):
    """A step of a device that runs each part once its host, which never waits, has launched it."""
    host = end = 0.0
    for _ in range(steps):
        begin, phases = end, []
        for host_ms, device_ms in parts:
            host += host_ms
            before, end = end, max(end, host) + device_ms
            phases.append(end - before)
    return end - begin, phases


LIMITED_BY_ITS_HOST = [
    ((2, 0), (8, 5), (10, 19), (10, 1)),
    ((1, 0), (9, 6), (9, 12), (10, 1)),
]


@pytest.mark.parametrize("parts", LIMITED_BY_ITS_HOST)
@pytest.mark.parametrize(("part", "changed"), [("optimizer", (3,)), ("computing", (1, 2))])
def test_a_part_that_keeps_the_host_is_bounded_by_what_the_device_then_idles(parts, part, changed):
    step_ms, measurement = host_limited(parts)
    quick = [(0.0, p[1]) if n in changed else p for n, p in enumerate(parts)]
    gain = step_ms / steady(quick)[0] - 1
    bound = next(b for b in upper_bounds(measurement) if b.part == part)
    assert gain > 0.15
    assert bound.gain >= gain - 1e-9
    idle_ms = step_ms - measurement.bottleneck_evidence["device_busy_ms"]
    assert f"the device idles {idle_ms:.2f} ms" in bound.evidence
    alone = measurement.phases_ms["optimizer"] / step_ms
    if part == "optimizer":
        assert bound.share == pytest.approx(alone + idle_ms / step_ms)


def test_what_the_device_idles_is_counted_once_over_several_parts():
    step_ms, measurement = host_limited(LIMITED_BY_ITS_HOST[0])
    found = upper_bounds(measurement)
    both = [by_name["optimizer_implementation"].knob, by_name["channels_last"].knob]
    shares = [share(measurement, part) for part in ("optimizer", "computing")]
    idle = 1 - measurement.bottleneck_evidence["device_busy_ms"] / step_ms
    assert headroom_of(found, both[:1]) == pytest.approx(gain_of(shares[0]))
    assert headroom_of(found, both) == pytest.approx(gain_of(min(1.0, sum(shares) - idle)))


@pytest.mark.parametrize(
    ("part", "phases"), [("loading", {"dataloader_next": 5.0}), ("communication", {})]
)
def test_idling_counts_for_what_no_steps_were_run_without(part, phases):
    evidence = {"device_busy_ms": 80.0}
    phases = {"comm_exposed": 5.0, **phases}
    assert share(job(phases, evidence), part) == pytest.approx(0.25)
    evidence[f"without_{part}_ms"] = 97.0
    assert share(job(phases, evidence), part) == pytest.approx(0.05)


def test_what_ranks_wait_for_one_another_is_said_where_it_counts():
    found = next(b for b in upper_bounds(job({"rank_wait": 9.0})) if b.part == "computing")
    assert found.share == pytest.approx(0.79)
    assert "70.00 ms of a 100.00 ms step, and ranks wait 9.00 ms for one another" in found.evidence


def test_a_rank_that_is_waited_for_does_not_wait_as_well():
    ranks = [
        {"phases_ms": {"forward": 30.0, "backward": 60.0, "comm_exposed": 2.0}},
        {"phases_ms": {"forward": 30.0, "backward": 28.0, "comm_exposed": 32.0}},
    ]
    phases = {"backward": 44.0, "comm_exposed": 2.0, "rank_wait": 15.0}
    assert share(job(phases, environment={"ranks": ranks}), "computing") == pytest.approx(0.90)


def test_a_few_names_stand_for_many():
    assert in_short(["a", "b", "c"]) == "a, b, c"
    assert in_short(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert in_short([]) == ""


def test_the_whole_step_bounds_nothing():
    assert math.isinf(gain_of(1.0))
    assert gain_of(0.5) == 1.0


def test_every_knob_of_the_runners_is_placed():
    names = {*effect_order(Use.DDP), *effect_order(Use.ZERO)}
    free = {name for name in names if affected_parts(by_name[name].knob) == tuple(Part)}
    assert free == {"omp_num_threads", "gradient_accumulation", "gc_each_steps"}


def test_what_a_script_does_beside_its_passes_is_the_rest():
    found = job({"other": 8.0, "callbacks": 4.0})
    rest = next(b for b in upper_bounds(found) if b.part == "rest")
    assert rest.share == pytest.approx(0.20)
    assert "other, callbacks and what no phase covers take 20.00 ms" in rest.evidence


def test_loading_alone_is_bounded_by_what_the_host_waits_longest():
    waits = {"loading_alone": 1.0, "loading_host_ms": 4.0, "dataloader_next_error_ms": 0.5}
    measurement = job({"dataloader_next": 2.0}, waits)
    assert [b.part for b in upper_bounds(measurement)] == [Part.LOADING]
    assert share(measurement, "loading") == pytest.approx((4.0 + 2 * 0.5) / 100)
    bounds = upper_bounds(measurement)
    assert headroom_of(bounds, [WORKERS]) == pytest.approx(5 / 95)
    assert headroom_of(bounds, [WORKERS, UNKNOWN]) == math.inf
