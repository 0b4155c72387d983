"""The runner without ranks: its space, its arithmetic, what it refuses and screens."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some
from support.zero_cases import make, trial
from support.zero_facts import gpt_facts

from perfsearch import knobs
from perfsearch.core.knob import Numerics
from perfsearch.core.narrow import KnobError
from perfsearch.core.trial import Measurement, Status
from perfsearch.knobs import batch as batches
from perfsearch.knobs.base import Use
from perfsearch.knobs.batch import ACCUMULATION
from perfsearch.runners.zero.runner import Zero


@given(some.integers(1, 96), some.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_with_a_fixed_batch_every_configuration_trains_exactly_it(share, world):
    runner = make(nproc=world, global_batch=share * world, knobs={"micro_batch": "search"})
    points = runner.space.listed()
    sizes = {int(p["micro_batch"]) for p in points} if runner.space.knobs else {share}
    assert sizes == {m for m in range(1, share + 1) if share % m == 0}
    for point in points:
        whole = {**runner.pinned, **point}
        times = runner.batch.accumulation_of(whole)
        assert int(whole["micro_batch"]) * times * world == share * world
        assert runner.batch.global_batch_of(whole) == share * world


@given(some.integers(1, 64), some.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_an_impossible_micro_batch_is_refused_with_the_nearest_that_are_not(share, value):
    batch = batches.Batch("fixed", share * 4, 4, share)
    if share % value == 0:
        assert batches.settle(batch, {"micro_batch": value}) == {"micro_batch": value}
        return
    with pytest.raises(KnobError) as refusal:
        batches.settle(batch, {"micro_batch": value})
    named = [int(w) for w in str(refusal.value).split("Nearest possible: ")[1].split(";")[0].split()
             if w.isdigit()]  # fmt: skip
    assert named
    assert all(share % n == 0 for n in named)
    between = range(min(value, *named) + 1, max(value, *named))
    assert not [n for n in between if share % n == 0 and n not in named]


@given(some.integers(1, 64), some.integers(64, 364))
@settings(max_examples=60, deadline=None)
def test_a_free_batch_stays_within_its_bounds(low, high):
    runner = make("free", global_batch=64, min_train_batch_size=low, max_train_batch_size=high)
    for point in runner.space.listed():
        assert low <= runner.batch.global_batch_of({**runner.pinned, **point}) <= high


@pytest.mark.parametrize(
    ("bounds", "key"),
    [
        ({"max_train_batch_size": 60}, "max_train_batch_size=60"),
        ({"min_train_batch_size": 65}, "min_train_batch_size=65"),
        ({"min_train_batch_size": 72, "max_train_batch_size": 128}, "min_train_batch_size=72"),
    ],
)
def test_bounds_that_exclude_the_jobs_own_batch_are_refused(bounds, key):
    with pytest.raises(ValueError, match=rf"runner.{key}: the job itself trains the global.* 64"):
        make("free", global_batch=64, **bounds)
    make("free", global_batch=64, min_train_batch_size=64, max_train_batch_size=64)


def test_accumulation_may_be_asked_for_instead():
    runner = make(knobs={"micro_batch": "search", "gradient_accumulation": [1, 4]})
    assert sorted(p["micro_batch"] for p in runner.space.listed()) == [4, 16]
    pinned = make(knobs={"micro_batch": "search", "gradient_accumulation": 2})
    assert pinned.pinned["micro_batch"] == 8
    with pytest.raises(KnobError, match=r"gradient_accumulation=5.*Nearest possible: 4 or 8"):
        make(knobs={"gradient_accumulation": 5})
    with pytest.raises(KnobError, match="their product must be 16"):
        make(knobs={"micro_batch": 4, "gradient_accumulation": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 5}, r"runner.micro_batch=5: .*Nearest possible: 4 or 8"),
        ({"max_train_batch_size": 64}, "runner.max_train_batch_size=64: batch=fixed"),
        ({"card": "H101"}, r"runner.card=H101: unknown.*H100"),
        ({"knobs": {"zero_stages": 1}}, "runner.knobs.zero_stages: no such knob.*zero_stage"),
        ({"knobs": {"cpu_offload": True}}, "runner.knobs.cpu_offload=True: no GPU is used"),
        ({"knobs": {"micro_batch": [4, 3]}}, "runner.knobs.micro_batch=3.*2 or 4"),
        ({"knobs": {"mixed_precision": ["policy", "autocast"]}}, "numerics=altering"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("batch", ["fixed", "free"])
@pytest.mark.parametrize("nproc", [1, 4])
def test_what_is_in_force_today_can_be_pinned(nproc, batch):
    today = {record.name: record.default for record in knobs.of(Use.ZERO)}
    today |= {name: knob.default for name, knob in make(batch, nproc).declared.items()}
    for name, value in today.items():
        made = make(batch, nproc, knobs={name: value})
        assert name in made.pinned.keys() | made.left_out.keys() or name == ACCUMULATION.name


def test_knobs_matter_only_in_their_stages():
    runner = make(knobs={"zero_stage": "search", "blocks_per_unit": "search",
                         "gradient_as_bucket_view": "search"})  # fmt: skip
    for point in runner.space.listed():
        if point["zero_stage"] < 2:
            assert point["blocks_per_unit"] == 1
        else:
            assert point["gradient_as_bucket_view"] is False
    assert len(runner.space.listed()) == 2 * 2 + 2 * 3
    assert "hybrid" not in runner.pinned
    assert make(knobs={"micro_batch": "search"}).pinned["zero_stage"] == 0


def test_the_batch_alters_the_computation_only_where_it_is_free():
    fixed, free = make(), make("free")
    assert fixed.space.by_name["micro_batch"].numerics is Numerics.REORDERED
    assert free.space.by_name["micro_batch"].numerics is Numerics.ALTERING
    assert "gradient_accumulation" in free.space.by_name
    assert fixed.left_out["gradient_accumulation"].startswith("with batch=fixed")
    assert fixed.baseline == {"micro_batch": 16, "zero_stage": 0, "activation_checkpointing": 0}


def test_what_surely_does_not_fit_is_screened_and_the_rest_is_not():
    runner = make("free", card="H100")
    runner.hints([])
    point = {**runner.baseline, "gradient_accumulation": 1}
    assert runner.screen({**point, "micro_batch": 16}) is None
    assert "GiB" in runner.screen({**point, "micro_batch": 112})
    assert runner.screen({**point, "micro_batch": 112, "zero_stage": 3,
                          "activation_checkpointing": 1}) is None  # fmt: skip
    trials = [trial(1, {**point, "micro_batch": 24}, status=Status.OOM)]
    hints = runner.hints(trials)
    assert "micro_batch=24 ran out of memory" in runner.screen({**point, "micro_batch": 28})
    assert hints.predict({**point, "micro_batch": 24}).peak_gib > 0.95 * 79.2


def test_predictions_depend_on_the_trials_alone():
    runner = make("free", card="H100")
    point = {**runner.baseline, "gradient_accumulation": 1, "micro_batch": 32}
    told = [trial(1, {**point, "micro_batch": 8}, 34.1), trial(2, {**point, "micro_batch": 12}, 43)]
    first = runner.predict(point, told[:1])
    second = runner.predict(point, told)
    assert runner.predict(point, told[:1]) == first
    assert make("free", card="H100").predict(point, told) == second
    assert first != second


def test_blocks_that_are_not_there_are_refused():
    runner = make(facts=gpt_facts(2, 128))
    runner.hints([])
    point = dict(runner.baseline)
    assert runner.screen({**point, "activation_checkpointing": 2}) is None
    assert runner.screen({**point, "activation_checkpointing": 4}) == (
        "activation_checkpointing=4: the model has 2 blocks"
    )


def test_headroom_and_allocator_retries_count():
    memory = make(card="H100").memory
    assert memory.lacks_headroom(Measurement([0.1], 64, peak_allocated_gib=75.0)) == ""
    assert "76.0 of 79.2 GiB leave 4.0%" in memory.lacks_headroom(
        Measurement([0.1], 64, peak_allocated_gib=76.0)
    )
    retried = Measurement(
        [0.1], 64, peak_allocated_gib=50.0, bottleneck_evidence={"allocator_retries": 3.0}
    )
    assert "try again 3 times" in memory.lacks_headroom(retried)


def test_when_nothing_fits_it_says_what_came_closest_and_by_how_much():
    runner = make(card="T4", facts=gpt_facts(96, 12_288, activations={
        f"{p}/{k}": (1e8, 1e9) for p in ("autocast", "policy") for k in (0, 1)}))  # fmt: skip
    advice = runner.advice([])
    # without accumulation: whole gradients of earlier micro-batches are kept otherwise
    assert advice.startswith("closest: micro_batch=16, zero_stage=3, activation_checkpointing=")
    assert "GiB too much; even runner.knobs.activation_checkpointing=1" in advice
    assert "runner.knobs.cpu_offload=True would need about 18.1 GiB" in advice
    assert advice.endswith("it takes more devices")


def test_advice_names_the_mildest_remedy_that_fits():
    runner = make(card="H100", knobs={"micro_batch": [16], "zero_stage": 0}, facts=gpt_facts(
        36, 1280, activations={"autocast/0": (1e9, 9e9), "autocast/1": (1e9, 1e9),
                               "policy/0": (0.0, 9e9), "policy/1": (0.0, 1e9)}))  # fmt: skip
    advice = runner.advice([])
    assert advice.startswith("closest: micro_batch=16, about 1")
    assert advice.endswith("GiB")
    assert "next: runner.knobs.zero_stage=3 runner.knobs.activation_checkpointing=1" in advice


def test_advice_on_memory_is_given_only_where_memory_was_lacking():
    runner = make(card="H100", knobs={"micro_batch": [1, 2], "zero_stage": "search"})
    failed = trial(0, runner.baseline, status=Status.DIVERGED)
    assert runner.advice([failed]) == ""
    failed.status = Status.OOM
    assert runner.advice([failed]).startswith("closest: micro_batch=1, zero_stage=3")


def test_the_option_file_names_every_knob():
    from perfsearch.knobs.zero import EFFECT_ORDER

    written = yaml.safe_load((Path(__file__).parents[3] / "conf/runner/zero.yaml").read_text())
    assert set(written["knobs"]) == set(EFFECT_ORDER)
    assert written.pop("name") == "zero"
    written.pop("knobs")
    assert tuple(written.pop("constraints")) == Zero.Options().constraints
    assert written == {f: getattr(Zero.Options(), f) for f in written}
