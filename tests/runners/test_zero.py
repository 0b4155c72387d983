"""The runner without ranks: its space, its arithmetic, what it refuses, prints and writes."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some
from zero_facts import GivenFacts, gpt_facts, gpt_large

from perfsearch.config import validate
from perfsearch.runners import _zero_batch
from perfsearch.runners.zero import Zero, ZeroOptions
from perfsearch.search.errors import BadInputError
from perfsearch.search.knob import Numerics
from perfsearch.search.narrow import KnobError
from perfsearch.search.trial import Measurement, Purpose, Status, Trial
from perfsearch.view import View
from perfsearch.workers.environment import Environment
from perfsearch.workloads.spec import WorkloadSpec

STAGES = ("0 ", "1 ", "2 ", "3 ")
SEARCHED = ("zero_stage", "micro_batch", "gradient_accumulation", "activation_checkpointing")


def make(batch="fixed", nproc=4, global_batch=64, facts=None, knobs=None, **options):
    runner = Zero(
        ZeroOptions(knobs=knobs or dict.fromkeys(SEARCHED, "search"), **options),
        WorkloadSpec("gpt", "large", global_batch=global_batch),
        Environment(Path("/nonexistent/run"), nproc=nproc),
        batch,
        planning=options.get("card") is not None,
    )
    runner.memory.facts = GivenFacts(facts or gpt_large())
    return runner


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
    batch = _zero_batch.Batch("fixed", share * 4, 4, share)
    if share % value == 0:
        assert _zero_batch.settle(batch, {"micro_batch": value}) == {"micro_batch": value}
        return
    with pytest.raises(KnobError) as refusal:
        _zero_batch.settle(batch, {"micro_batch": value})
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


def test_the_estimate_shows_only_what_a_search_may_try(capsys):
    def table(batch="fixed", **options):
        make(batch, card="H100", **options).estimate(None, View())
        lines = capsys.readouterr().out.splitlines()
        columns = re.findall(r"(\d+) x (\d+)", next(x for x in lines if x.startswith("ZeRO")))
        return [(int(m), int(t)) for m, t in columns], [x for x in lines if x[:2] in STAGES]

    columns, rows = table("free", min_train_batch_size=33, max_train_batch_size=80)
    assert (16, 1) in columns
    assert all(33 <= m * times * 4 <= 80 for m, times in columns)
    columns, rows = table(knobs={"micro_batch": [4, 8], "zero_stage": [1, 3],
                                 "activation_checkpointing": 2})  # fmt: skip
    assert columns == [(4, 4), (8, 2)]
    assert [(row[0], "1 in 2" in row) for row in rows] == [("1", True), ("3", True)]
    columns, rows = table("free", knobs={"micro_batch": [4, 8], "gradient_accumulation": 8})
    assert columns == [(4, 8), (8, 8)]
    assert {row[0] for row in rows} == {"0"}
    with pytest.raises(BadInputError, match="no micro_batch with any gradient_accumulation"):
        table("free", max_train_batch_size=64,
              knobs={"micro_batch": 16, "gradient_accumulation": [2, 4]})  # fmt: skip


def test_a_device_of_mebibytes_is_told_in_them(capsys):
    make(device_memory_gib=0.008).estimate(None, View())
    assert "8.19 MiB a device, of which 7.78 may be used" in capsys.readouterr().out


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


def trial(number, configuration, peak=None, status=Status.OK):
    measured = None
    if peak is not None:
        measured = Measurement([0.1], 64, peak_allocated_gib=peak)
    cost = 0.1 / 64 if status is Status.OK else None
    return Trial(number, configuration, Purpose.SEARCH, status, measured, cost, objective=640.0)


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


def test_the_estimate_is_a_table_for_a_card_that_is_absent(capsys):
    plain = {
        "mode": "estimate",
        "runner": {"name": "zero", "card": "H100"},
        "strategy": {"name": "fast"},
        "workload": {"name": "gpt", "size": "large", "global_batch": 128},
        "nproc": 4,
        "batch": "free",
    }
    configuration = validate(plain)
    runner = Zero.from_settings(configuration)
    runner.memory.facts = GivenFacts(gpt_large())
    assert runner.estimate(configuration, View()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "774.0 M parameters" in lines[0]
    assert lines[1].startswith("79.2 GiB a device, of which 75.2 may be used")
    head = next(line for line in lines if line.startswith("ZeRO stage"))
    assert head.split()[-2:] == ["x", "1"]
    rows = [line for line in lines if line[:2] in STAGES]
    assert len(rows) == 8
    at_rest = [float(row.split("none")[1].split()[0]) for row in rows if "none" in row]
    gib = 774_030_080 * 4 / 2**30
    assert at_rest == pytest.approx([5 * gib, 3.5 * gib, gib, gib], rel=0.03)
    assert " no" in rows[0]
    assert " ok" in rows[-1]


@pytest.mark.parametrize(
    ("facts", "unit", "margin"),
    [
        (gpt_facts(1, 64, vocabulary=100, length=4,
                   activations={"autocast/0": (0.0, 100.0), "policy/0": (0.0, 100.0)}),
         "MiB", r"0\.4\d GiB"),
        (gpt_large(), "GiB", r"0\.7\d to 8\.\d\d GiB"),
    ],
)  # fmt: skip
def test_the_margin_is_a_size_and_small_tables_are_in_mib(capsys, facts, unit, margin):
    make(card="H100", facts=facts).estimate(None, View())
    lines = capsys.readouterr().out.splitlines()
    assert f"predicted peak in {unit} " in lines[-1]
    assert re.search(f"margin: 2 standard deviations, {margin} here before any trial", lines[-1])
    at_rest = [float(line.split()[4]) for line in lines if line.startswith("3 ")]
    assert min(at_rest) > 0


def test_no_facts_means_no_estimate_and_no_crash(capsys):
    runner = make(card="H100")
    runner.memory.facts = GivenFacts(None)
    runner.memory.facts.error = "ValueError: no"
    assert runner.estimate(None, View()) == 1
    assert "no estimate: the job could not be described (ValueError: no)" in capsys.readouterr().out
    assert runner.screen(runner.baseline) is None
    assert runner.hints([]).predict(runner.baseline).peak_gib is None
    assert runner.advice([]) == ""


def test_an_estimate_of_what_is_no_job_is_bad_input():
    runner = make(card="H100")
    runner.memory.facts = GivenFacts(None)
    runner.memory.facts.error = "TypeError: workload.factory=m:f: the model has no parameters"
    with pytest.raises(BadInputError, match=r"^workload.factory=m:f: the model has no parameters"):
        runner.estimate(None, View())


def exported(tmp_path, **configuration):
    runner = make(knobs={"zero_stage": "search", "blocks_per_unit": 1})
    trials = [trial(0, {"zero_stage": 0}, 50.0), trial(1, {"zero_stage": 2}, 40.0),
              trial(2, {"zero_stage": 3}, status=Status.OOM)]  # fmt: skip
    trials[1].cost, trials[1].objective, trials[1].seconds = 0.05 / 64, 1280.0, 2.5
    runner.hints(trials)
    whole = {**runner.pinned, "zero_stage": 0, **configuration}
    files = runner.export(whole, tmp_path)
    assert all(path.exists() for path in files)
    return {path.name: path.read_text() for path in files}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_the_torch_form_is_python(tmp_path, stage, every):
    files = exported(
        tmp_path, zero_stage=stage, activation_checkpointing=every, micro_batch=8,
        blocks_per_unit=2, forward_prefetch=1, backward_prefetch=1, shard_group_size=2,
    )  # fmt: skip
    tree = ast.parse(files["zero.py"])
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert names == ["build", "train_step"]
    deepspeed = json.loads(files["ds_config.json"])
    assert deepspeed["train_batch_size"] == 64
    assert deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert deepspeed["gradient_accumulation_steps"] == 2
    assert deepspeed["zero_optimization"]["stage"] == stage
    assert ("hf_trainer_args.json" in files) == (not every and stage == 0)
    if every:
        assert "not every second or fourth" in files["notes.txt"]


def test_trainer_and_accelerate_get_what_they_can_say(tmp_path):
    files = exported(tmp_path, zero_stage=3, activation_checkpointing=1, micro_batch=4)
    trainer = json.loads(files["hf_trainer_args.json"])
    assert trainer["fsdp"] == "full_shard auto_wrap"
    assert trainer["gradient_accumulation_steps"] == 4
    assert trainer["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["Block"]
    accelerate = yaml.safe_load(files["accelerate_fsdp.yaml"])
    assert accelerate["fsdp_config"]["fsdp_version"] == 2
    assert accelerate["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert accelerate["num_processes"] == 4
    assert "gradient_accumulation_steps=4" in files["notes.txt"]
    assert "load batches of 4" in files["notes.txt"]
    assert "wrap every block as zero.py does" in files["notes.txt"]


LOADED_BY_ACCELERATE = {
    "compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes",
    "use_cpu", "fsdp_config",
}  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_knows_every_key_of_its_file(tmp_path, stage):
    files = exported(tmp_path, zero_stage=stage, micro_batch=4)
    assert set(yaml.safe_load(files["accelerate_fsdp.yaml"])) == LOADED_BY_ACCELERATE
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    loaded = config_args.load_config_from_file(str(tmp_path / "accelerate_fsdp.yaml"))
    assert loaded.num_processes == 4
    assert loaded.fsdp_config["fsdp_reshard_after_forward"] is (stage == 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_trainer_takes_arguments_found_on_cpus(tmp_path, stage):
    files = exported(tmp_path, zero_stage=stage, micro_batch=4)
    trainer = json.loads(files["hf_trainer_args.json"])
    assert trainer["use_cpu"] is True  # without it Trainer looks for a GPU, and refuses bf16
    transformers = pytest.importorskip("transformers")
    made = transformers.TrainingArguments(str(tmp_path), **trainer)
    assert made.gradient_accumulation_steps == 4


def test_the_summary_names_what_is_pinned(tmp_path):
    runner = make(knobs={"zero_stage": 3, "micro_batch": 4, "activation_checkpointing": "search"})
    done = trial(0, {"activation_checkpointing": 0}, 50.0)
    done.cost, done.objective = 0.05 / 64, 1280.0
    runner.hints([done])
    runner.export(runner.baseline, tmp_path)
    rows = (tmp_path / "summary.txt").read_text().splitlines()
    assert rows[1].split() == ["z3", "1", "1280.00", "z3_tmbspg4", "(trial", "0)"]


def test_the_summary_has_a_row_for_each_space_and_the_total_time(tmp_path):
    text = exported(tmp_path, zero_stage=2)["summary.txt"]
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["tuning_space"] == [
        "tuning_space", "num_experiments", "best_metric_val", "best_exp_name"
    ]  # fmt: skip
    assert rows["z2"][:3] == ["z2", "1", "1280.00"]
    assert rows["z3"] == ["z3", "1", "none", "none"]
    assert rows["all"][1:3] == ["3", "1280.00"]
    assert "Tuning took 2.5 s in 3 experiments" in text


def test_the_option_file_names_every_knob():
    from perfsearch.runners._zero_knobs import EFFECT_ORDER

    written = yaml.safe_load((Path(__file__).parents[2] / "conf/runner/zero.yaml").read_text())
    assert set(written["knobs"]) == set(EFFECT_ORDER)
    assert written.pop("name") == "zero"
    written.pop("knobs")
    assert written == {f: getattr(ZeroOptions(), f) for f in written}
