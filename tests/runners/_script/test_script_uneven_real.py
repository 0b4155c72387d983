"""Scripts of uneven steps in real processes, scored as their own clock says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.steps import read_window
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.metrics.diagnosis import MADE_AGAIN
from perfsearch.pipeline.session import with_look
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
SCRIPT = str(Path(__file__).parents[3] / "benchmarks" / "_uneven_job.py")


def measured(directory, kind, workers=0, steps=400):
    """A baseline of the script, and its own clock's seconds of each step of the same window."""
    clock, scratch = directory / "clock.json", directory / "scratch.pt"
    arguments = (SCRIPT, kind, "--steps", str(steps), "--workers", str(workers))
    words = (*arguments, "--clock", str(clock), "--scratch", str(scratch))
    return measured_by_clock(directory, words, clock)


def measured_by_clock(directory, words, clock):
    """A baseline of a script that writes the ends of its steps to ``clock`` as a JSON list."""
    options = Script.Options(words)
    environment = Environment(directory, nproc=1, limits=Limits(120, 120, 5))
    runner = Script("cpu", {}, options, environment)
    try:
        runner.open(directory)
        plan = Plan(0, Purpose.BASELINE, log_directory=directory / "logs" / "0")
        outcome = runner.measure(runner.baseline, with_look(plan, None))
    finally:
        runner.close()
    assert outcome.status is Status.OK, outcome.reason
    found = outcome.measurement
    ends = json.loads(clock.read_text())
    begin = found.discarded_steps - 1
    own = [b - a for a, b in zip(ends[begin:], ends[begin + 1 :], strict=False)]
    return found, own[: len(found.step_seconds)]


def one_of_three_starts(directory, measure, check):
    """Hold what ``measure`` returns of a new directory to ``check``, in one of three starts.

    Other work on the machine can fall between the two clocks at the end of a step, or be as slow as
    the script is: then they differ, or take different steps for slow.
    """
    for start in ("first", "second", "third"):
        (directory / start).mkdir()
        found, own = measure(directory / start)
        try:
            return check(found, own)
        except AssertionError:
            if start == "third":
                raise


def test_where_steps_are_faster_when_made_again_each_configuration_gets_a_new_start(
    tmp_path, monkeypatch
):
    """Each new length has a plan made for it, which the running script keeps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # with more, other work makes steps longer by far
    text = (SCRIPTS / "uneven_lengths.py").read_text()
    assert "time.sleep(0.05)" in text  # as long as a step, where other work takes the processors
    script = tmp_path / "uneven_lengths.py"
    script.write_text(text.replace("time.sleep(0.05)", "time.sleep(0.3)"))
    options = Script.Options((str(script),))
    environment = Environment(tmp_path, nproc=1, limits=Limits(120, 120, 5))
    runner = Script("cpu", {"optimizer_implementation": "search"}, options, environment)
    try:
        runner.open(tmp_path)
        baseline, other = (
            {**runner.baseline, "optimizer_implementation": name} for name in ("default", "foreach")
        )
        plan = Plan(0, Purpose.BASELINE, log_directory=tmp_path / "logs" / "0")
        first = runner.measure(baseline, with_look(plan, None))
        assert first.status is Status.OK, first.reason
        assert first.measurement.environment[MADE_AGAIN] > 0
        outcome = runner.measure(other, replace(plan, number=1, purpose=Purpose.SEARCH))
        assert (outcome.status, outcome.fresh_process) == (Status.OK, True)
        trial = Trial(0, baseline, Purpose.BASELINE, first.status, first.measurement)
        assert any("given a new start" in line for line in runner.closing_lines(other, [trial]))
    finally:
        runner.close()


def scored_as_its_clock_says(found, own):
    assert sum(found.step_seconds) == pytest.approx(sum(own), rel=0.1)
    assert found.step_time_s == pytest.approx(read_window(own).step_s, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "workers", "cause", "period"),
    [
        ("pause", 0, "own_work", 8),
        ("lengths", 0, "", None),
        ("rollout", 0, "own_work", 20),
        ("saving", 0, "saving", 10),
        ("validation", 0, "validation", 12),
        ("bursts", 0, "", None),
        ("bursts", 3, "", None),
        ("bursts", 8, "", None),
    ],
)
def test_a_window_is_scored_as_the_scripts_own_clock_says(tmp_path, kind, workers, cause, period):
    def check(found, own):
        scored_as_its_clock_says(found, own)
        kinds = found.environment["slow_steps"]
        if cause:  # a machine with other work on it has slow steps of its own, even longer ones
            assert cause in {kind["cause"] for kind in kinds}
        # other work may make as many slow steps as the script; its own clock has those, too
        if period is not None and recurs(period, [k.period_steps for k in read_window(own).slow]):
            assert recurs(period, [kind["period_steps"] for kind in kinds])

    one_of_three_starts(tmp_path, lambda place: measured(place, kind, workers), check)


def recurs(period, found):
    return any(steps == pytest.approx(period, rel=0.25) for steps in found if steps is not None)


STAMPED = """\
import json as _json, time as _time
from torch.optim.optimizer import register_optimizer_step_post_hook as _hook
_ends = []
def _note(*_):
    _ends.append(_time.perf_counter())
    open({clock!r}, "w").write(_json.dumps(_ends))
_hook(_note)
"""


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("periodic_pause.py", 2),
        ("worker_bursts_ok.py", 4),
        ("uneven_lengths.py", 0),
    ],
)
def test_a_script_of_uneven_steps_is_scored_within_a_tenth(tmp_path, monkeypatch, name, workers):
    monkeypatch.setenv("WORKERS", str(workers))
    clock = tmp_path / "clock.json"
    text = (SCRIPTS / name).read_text()
    (tmp_path / name).write_text(STAMPED.format(clock=str(clock)) + text)
    words = (str(tmp_path / name),)
    one_of_three_starts(
        tmp_path,
        lambda directory: measured_by_clock(directory, words, clock),
        scored_as_its_clock_says,
    )


def test_a_script_with_few_steps_is_still_measured(tmp_path):
    found, _ = measured(tmp_path, "pause", steps=68)
    assert 8 <= len(found.step_seconds) <= 65
    assert found.samples_per_step == 16
