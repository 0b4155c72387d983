"""``perfsearch-run --profile``: an unchanged script in real processes, measured and explained."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from support.profile_cases import MS
from support.started_scripts import run

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "support" / "profile_cases.py")


def profile(directory, place, *options, nproc=2):
    """The trial on record, and everything that was said."""
    start = ["-m", "perfsearch.cli.run", "--profile", f"--nproc-per-node={nproc}"]
    given = ["runner.device=cpu", "run_dir=run", "tracking.enabled=false", *options]
    start += [word for key in given for word in ("-o", key)]
    told, more = run(directory, *start, SCRIPT, place)
    events = map(json.loads, (directory / "run" / "journal.jsonl").read_text().splitlines())
    trials = [e["trial"] for e in events if e.get("event") == "finished"]
    assert [t["purpose"] for t in trials] == ["baseline"]
    return trials[0]["measurement"], told + more


def check(measurement, phase):
    """Most of the step is this phase, and the phases together are the steps that they are of.

    A machine that is busy makes sleeps longer, never shorter.
    """
    phases = measurement["phases_ms"]
    step_ms = measurement["bottleneck_evidence"]["phases_step_ms"]
    assert sum(phases.values()) == pytest.approx(step_ms, rel=0.05)
    assert MS <= phases[phase] <= step_ms
    assert max(phases, key=phases.get) == phase, phases


@pytest.mark.parametrize(
    ("place", "phase"),
    [("loader", "dataloader_next"), ("scheduler", "step_lr_schedulers"), ("own", "other")],
)
def test_a_script_is_profiled_and_nothing_is_searched(place, phase, tmp_path):
    measurement, told = profile(tmp_path, place, "metrics.trace=true", "metrics.end_step=9")
    check(measurement, phase)
    assert measurement["world_size"] == 2
    findings = "\n".join(measurement["environment"]["findings"])
    assert ("input_bound (high)" in findings) == (place == "loader")
    assert f"what holds it back:\n- {findings.splitlines()[0]}" in told
    assert "of the step" in told and "gain" not in told.partition("where a step")[2]  # not known
    assert "nothing searched" in told
    assert "warning: metrics.end_step=9 has no effect on this script" in told
    traces = sorted((tmp_path / "run" / "trace" / "baseline").glob("rank*.trace.json.gz"))
    assert [trace.name[:5] for trace in traces] == ["rank0", "rank1"]
    assert measurement["detail_seconds"] > 0  # system metrics are of the time before
    seen = json.loads(gzip.decompress(traces[1].read_bytes()))["traceEvents"]
    steps = [e for e in seen if str(e.get("name", "")).startswith("Optimizer.step#AdamW")]
    assert len(steps) in (2, 3)  # it begins in the midst of one
    assert not (tmp_path / "run" / "best").exists()


@pytest.mark.parametrize(
    ("place", "needs"), [("hf-trainer", "transformers"), ("lightning", "lightning")]
)
def test_callbacks_of_a_framework_are_a_phase(place, needs, tmp_path):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    measurement, _ = profile(tmp_path, place, nproc=1)
    check(measurement, "callbacks")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("alone", "less than objective.min_gain=0.9"),
        ("own", "warning: objective.min_gain=0.9 has no effect on this script: its phases do not"),
    ],
)
def test_a_search_that_cannot_gain_enough_is_not_begun(place, says, tmp_path):
    """The optimizer is all that is searched, and takes next to nothing."""
    start = ["-m", "perfsearch.cli.run", "--search", "--nproc-per-node=1"]
    fixed = ("bucket_cap_mb=25", "omp_num_threads=1", "first_bucket_mb=1", "static_graph=false")
    fixed += ("dataloader_workers=0",)
    keys = (
        *("runner.device=cpu", "run_dir=run", "tracking.enabled=false", "budget.trials=0"),
        *("objective.min_gain=0.9", "runner.knobs.gradient_as_bucket_view=false"),
        *(f"runner.knobs.{pin}" for pin in fixed),
    )
    start += [word for key in keys for word in ("-o", key)]
    told, _ = run(tmp_path, *start, SCRIPT, place)
    assert says in told
    assert ("min_gain=0.9 has no effect" in told) == (place == "own")
