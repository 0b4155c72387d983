"""Failures of scripts, in words."""

import os
from pathlib import Path

import pytest
from support.script_starts import Group

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Status
from perfsearch.instrument.launch import LaunchConfig
from perfsearch.knobs.transport import Mapped
from perfsearch.runners._script.group import EndedError, ScriptGroup
from perfsearch.runners._script.ways import Way
from perfsearch.runners._script.window import failed_outcome, require_ranks_together
from perfsearch.workers.failures import UNUSED_REASON, Failure
from perfsearch.workers.group import GroupGone
from perfsearch.workers.preload import Preloaded

MAPS = [Mapped("micro_batch", "--bs"), Mapped("gradient_accumulation", "--acc", default=1)]


def test_a_refused_argument_names_the_map_that_is_to_blame():
    failure = Failure(Status.CRASH, "rank 0: ScriptExitError: exit code 2", 0)
    tail = "usage: train.py\ntrain.py: error: unrecognized arguments: --bs 4\n"
    found = failed_outcome(Group(failure, tail=tail), GroupGone(), {}, MAPS)
    assert found.status is Status.INVALID
    assert "unrecognized arguments: --bs 4 (from --map micro_batch=--bs)" in found.reason


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (Status.INVALID, "launcher: UsageError: argument --x: invalid value",
         "torchrun refused its options: argument --x: invalid value (it takes options from the "
         "environment, too: PET_X)"),
        (Status.INFRASTRUCTURE, "launcher: OSError: [Errno 28]", "launcher: OSError: [Errno 28]"),
    ],
)  # fmt: skip
def test_what_the_launcher_says_is_the_cause(monkeypatch, status, reason, says):
    monkeypatch.setenv("PET_X", "1")
    found = failed_outcome(Group(Failure(status, reason)), GroupGone(), {}, [])
    assert (found.status, found.reason) == (status, says)
    assert found.log_path == str(Path("logs/launcher.log"))


def test_a_launcher_that_ends_without_a_report_leaves_its_last_words(tmp_path):
    """One that cannot even be imported, say: there is no rank, so no rank's log either."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no')")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text("of an earlier start\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    group = ScriptGroup(
        LaunchConfig("train.py"), [], {}, Way(1, by_torchrun=True),
        Environment(tmp_path, limits=Limits(60, 60, 5)), (), logs,
        lambda log: Preloaded(environ, tmp_path, log, "perfsearch.instrument.launch"),
    )  # fmt: skip
    with pytest.raises(GroupGone) as gone:
        group.join()
    found = failed_outcome(group, gone.value, {}, [])
    assert found.reason == "launcher: ImportError: libcudart.so.12: no"
    assert found.log_path == str(logs / "launcher.log")


def test_a_script_that_makes_no_step_is_told_what_a_step_is():
    failure = Failure(Status.TIMEOUT, "the trial took longer than 5 s")
    found = failed_outcome(Group(failure), GroupGone(5.0), {}, [])
    assert found.status is Status.TIMEOUT
    assert "rank 0 made 0 steps, rank 1 made 0 steps" in found.reason
    assert "limits.trial_s" in found.reason
    stands = "rank 0 stands at train.py:8 in step"
    told = Failure(Status.TIMEOUT, f"the trial took longer than 5 s; {stands}", stack_dump=stands)
    found = failed_outcome(Group(told, steps=(3, 3)), GroupGone(5.0), {}, [])
    assert found.reason == f"no answer in 5 s: rank 0 made 3 steps, rank 1 made 3 steps; {stands}"
    found = failed_outcome(Group(told), GroupGone(5.0), {}, [])
    assert f"; {stands}. A step is counted when" in found.reason


def test_ranks_that_part_are_counted():
    failure = Failure(Status.TIMEOUT, "no answer")
    found = failed_outcome(Group(failure, steps=(12, 10), ended=[1]), GroupGone(5.0), {}, [])
    assert found.status is Status.INVALID
    assert "rank 0 made 12, rank 1 made 10, and rank 1 has ended" in found.reason


def test_ranks_that_train_apart_are_refused():
    apart = [{"joined": 1, "facts": {"wrappers": []}}]
    with pytest.raises(EndedError, match="train apart"):
        require_ranks_together(apart, 2)
    require_ranks_together(apart, 1)


def test_a_knob_of_the_trial_is_blamed_and_not_the_model():
    failure = Failure(Status.INVALID, f"rank 1: {UNUSED_REASON}", 1)
    changed = {"find_unused_parameters": False}
    found = failed_outcome(Group(failure), GroupGone(), changed, [])
    assert "find_unused_parameters=false of this trial" in found.reason
    assert "requires_grad_" not in found.reason
    assert "requires_grad_" in failed_outcome(Group(failure), GroupGone(), {}, []).reason
