import numpy as np
import pytest

from perfsearch.core.hints import Hints, PriorSearch
from perfsearch.core.knob import Kind, Knob, Part
from perfsearch.core.space import Constraint, Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.strategies import load
from perfsearch.strategies._staged import Staged, part_of

SPACE = Space(
    [
        Knob("bucket_cap_mb", Kind.ORDINAL, 1, (1, 2, 4, 8), shortens=(Part.COMMUNICATION,)),
        Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1, 2), shortens=(Part.LOADING,)),
        Knob(
            "prefetch_factor",
            Kind.ORDINAL,
            2,
            (2, 4),
            when={"dataloader_workers": (1, 2)},
            shortens=(Part.LOADING,),
        ),
        Knob(
            "optimizer_implementation",
            Kind.CATEGORICAL,
            "default",
            ("default", "fused"),
            shortens=(Part.OPTIMIZER,),
        ),
    ],
    [Constraint("no 8 with 2", lambda c: (c["bucket_cap_mb"], c["dataloader_workers"]) != (8, 2))],
)
BASELINE = {knob.name: knob.default for knob in SPACE.knobs}


def ended(number, configuration, cost, purpose=Purpose.SEARCH, **phases):
    measurement = Measurement([cost] * 5, 1)
    if phases:
        measurement.phases_ms = phases
        evidence = {"with_everything_ms": 100.0, "detailed_step_ms": 100.0}
        measurement.bottleneck_evidence = evidence
    return Trial(number, configuration, purpose, Status.OK, measurement, cost=cost)


def searching(strategy="grid", **phases):
    kind = load(strategy)
    made = Staged(SPACE, Hints(dict(BASELINE)), 0, lambda space, hints: kind(space, hints, 0))
    made.tell(ended(0, dict(BASELINE), 1.0, Purpose.BASELINE, **phases))
    return made


def walk(strategy, cost, steps=60):
    asked = []
    while len(asked) < steps:
        point = strategy.ask()
        if point is None:
            break
        assert SPACE.feasible(point)
        asked.append(point)
        strategy.tell(ended(len(asked), point, cost(point)))
    return asked


def test_groups_come_by_their_bounds_and_small_ones_not_at_all():
    made = searching(comm_exposed=10.0, dataloader_next=30.0, optimizer=0.1, forward=59.9)
    assert "loading (dataloader_workers, prefetch_factor), then communication" in made.describe()
    asked = walk(made, lambda p: 1.0)
    assert {p["optimizer_implementation"] for p in asked} == {"default"}
    first = [p["dataloader_workers"] for p in asked[:4]]
    assert all(first)
    assert "every group" in made.stop_reason


def test_later_groups_stand_on_the_best_of_earlier_ones():
    def cost(p):
        return 1.0 - 0.3 * (p["dataloader_workers"] == 1) - 0.1 * (p["bucket_cap_mb"] == 4)

    made = searching(comm_exposed=10.0, dataloader_next=30.0, optimizer=0.1, forward=59.9)
    asked = walk(made, cost)
    assert min(asked, key=cost) == {**BASELINE, "dataloader_workers": 1, "bucket_cap_mb": 4}
    buckets = [p for p in asked if p["bucket_cap_mb"] != 1]
    assert {p["dataloader_workers"] for p in buckets} == {1}


def test_what_is_advised_is_tried_first_also_in_a_later_group():
    made = searching("bayes", comm_exposed=30.0, dataloader_next=10.0, optimizer=0.1, forward=59.9)
    baseline = made._trials[0]
    baseline.measurement.environment["causes"] = {
        "communication_bound": [],
        "input_bound": ["unknown"],
    }
    asked = walk(made, lambda p: 0.9 + (p["bucket_cap_mb"] != 4))
    later = [p for p in asked if p["dataloader_workers"]]
    assert later[0]["bucket_cap_mb"] != 1
    assert (later[0]["dataloader_workers"], later[0]["prefetch_factor"]) == (2, 4)


def test_without_timings_everything_is_one_group():
    made = searching()
    assert made.describe().startswith("group by group: all (bucket_cap_mb, dataloader_workers")
    generator = np.random.default_rng(0)
    asked = walk(made, lambda p: float(generator.uniform(1, 2)))
    assert any(p["bucket_cap_mb"] != 1 and p["dataloader_workers"] for p in asked)


@pytest.mark.parametrize("name", ["random", "bayes", "auto", "grid"])
def test_the_same_calls_give_the_same_proposals(name):
    def run():
        made = searching(name, comm_exposed=10.0, dataloader_next=30.0, optimizer=9.0)
        return walk(made, lambda p: 1.0 + p["bucket_cap_mb"] / 10, steps=12)

    assert run() == run()


def test_a_knob_whose_condition_does_not_hold_is_left_out_of_its_group():
    fixed = dict(BASELINE)
    alone = part_of(SPACE, ("prefetch_factor",), fixed)
    assert alone.knobs == ()
    met = part_of(SPACE, ("prefetch_factor",), {**fixed, "dataloader_workers": 2})
    assert [k.name for k in met.knobs] == ["prefetch_factor"]
    assert met.knobs[0].when == {}
    buckets = part_of(SPACE, ("bucket_cap_mb",), {**fixed, "dataloader_workers": 2})
    assert buckets.listed() == [{"bucket_cap_mb": n} for n in (1, 2, 4)]


def test_a_group_gets_what_was_found_with_the_others_as_they_are():
    given = []

    def make(space, hints):
        given.append(hints)
        return load("grid")(space, hints, 0)

    costs = [
        ({**BASELINE, "bucket_cap_mb": 4}, -0.3),
        ({**BASELINE, "bucket_cap_mb": 4, "optimizer_implementation": "fused"}, -0.4),
    ]
    beside = {"bucket_cap_mb": ("dataloader_workers", "prefetch_factor"), "prefetch_factor": ()}
    hints = Hints(
        dict(BASELINE), neighbours=beside, prior_search=PriorSearch("before", tuple(costs))
    )
    made = Staged(SPACE, hints, 0, make)
    made.tell(ended(0, dict(BASELINE), 1.0, Purpose.BASELINE, comm_exposed=10.0))
    made.ask()
    assert set(given[0].baseline) == {"bucket_cap_mb"}
    assert given[0].prior_search == PriorSearch("before", (({"bucket_cap_mb": 4}, -0.3),))
    assert given[0].neighbours == {"bucket_cap_mb": ()}
