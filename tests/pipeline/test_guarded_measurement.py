from pathlib import Path

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.journal import read
from perfsearch.core.trial import Outcome, Status


def raising(error: Exception, at: int):
    def fail(configuration, plan):
        if plan.number == at:
            raise error
        return None

    return fail


def test_a_trial_whose_runner_raises_is_recorded_with_its_traceback(search: Search) -> None:
    """optuna/optuna#386: after an exception in trial k there are k trials, and it goes on."""
    result = search(SyntheticRunner(fail=raising(RuntimeError("boom\nand more"), 3)))
    assert result.exit_code == 0
    failed = next(t for t in result.trials if t.number == 3)
    assert (failed.status, failed.reason) == (
        Status.CRASH,
        "the runner raised RuntimeError: boom",
    )
    assert "Traceback" in Path(failed.log_path).read_text()
    _, events = read(result.run_dir / "journal.jsonl")
    ended = [e.data["trial"]["number"] for e in events if e.name == "finished"]
    assert ended == list(range(len(ended)))


def test_a_system_call_that_fails_is_not_the_configurations_fault(search: Search) -> None:
    result = search(SyntheticRunner(fail=raising(OSError(24, "Too many open files"), 3)))
    failed = next(t for t in result.trials if t.number == 3)
    assert failed.status is Status.INFRASTRUCTURE
    assert sum(p.number == 3 for p in search.runner.plans) == 3


@pytest.mark.parametrize("number", [0, 2])
def test_whether_one_failure_ends_the_search_is_asked_of_every_trial(
    search: Search, number: int
) -> None:
    """automl/SMAC3#410: running out of memory, the first run too is a failure like any other.

    Any other failure of trial 0 leaves nothing to compare with: see ``test_limits.py``.
    """

    def fail(configuration, plan):
        return Outcome(Status.OOM, reason="out of memory") if plan.number == number else None

    assert search(SyntheticRunner(fail=fail)).exit_code == 0
    stopped = search(SyntheticRunner(fail=fail), on_failure="stop", resume="never")
    assert stopped.exit_code == (1 if number == 0 else 3)
    assert len(stopped.trials) >= number + 1
