"""Time that is over, and failures in a row."""

import time

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.objective import Budget
from perfsearch.core.trial import Outcome, Purpose, Status
from perfsearch.pipeline.session import CUT_OFF


def hang(seconds: float, purpose: Purpose):
    """As a group does: what lasts longer than its limit is a timeout."""

    def fail(configuration, plan):
        if plan.purpose is not purpose or plan.number < 2:
            return None
        time.sleep(min(seconds, plan.time_limit_s))
        if seconds < plan.time_limit_s:
            return None
        return Outcome(Status.TIMEOUT, reason=f"took longer than {plan.time_limit_s:g} s")

    return fail


def test_a_trial_is_cut_off_when_the_search_is_over(search: Search) -> None:
    runner = SyntheticRunner(fail=hang(30, Purpose.SEARCH))
    begin = time.monotonic()
    result = search(
        runner, budget={"trials": 9, "seconds": 0.3}, limits={"grace_s": 0.2}, sentinel_every=0
    )
    assert time.monotonic() - begin < 10
    cut = [t for t in result.trials if t.status is Status.INTERRUPTED]
    assert [(t.number, t.reason) for t in cut] == [(2, CUT_OFF)]
    assert result.reason == "budget.seconds=0.3 spent"
    assert result.exit_code == 0
    limited = next(p for p in runner.plans if p.number == 2)
    assert limited.time_limit_s <= 0.5


def test_confirmation_ends_too(search: Search) -> None:
    runner = SyntheticRunner(fail=hang(30, Purpose.CONFIRM))
    begin = time.monotonic()
    result = search(runner, confirm={"seconds": 0.3}, limits={"grace_s": 0.2}, budget={"trials": 3})
    assert time.monotonic() - begin < 10
    assert result.verdict.winner is None
    assert "too few repeats" in result.verdict.reason
    assert result.trials[-1].reason == CUT_OFF


def test_without_a_baseline_a_confirmation_that_is_cut_off_claims_nothing(search: Search) -> None:
    slow = hang(30, Purpose.CONFIRM)

    def fail(configuration, plan):
        if plan.purpose is Purpose.BASELINE:
            return Outcome(Status.OOM, reason="oom")
        return slow(configuration, plan)

    result = search(
        SyntheticRunner(fail=fail),
        confirm={"seconds": 0.1},
        limits={"grace_s": 0.1},
        budget={"trials": 3},
    )
    assert result.verdict.interval is None
    assert "not confirmed in confirm.seconds" in result.verdict.reason
    assert "no speed-up can be stated" in result.verdict.reason
    assert result.best != {"bucket": 1, "view": False}, "it does not run"


def test_what_is_cut_off_in_a_later_block_leaves_the_whole_blocks(search: Search) -> None:
    def fail(configuration, plan):
        if plan.purpose is Purpose.CONFIRM and plan.number >= 11:
            time.sleep(plan.time_limit_s)
            return Outcome(Status.TIMEOUT, reason="slow")
        return None

    result = search(
        SyntheticRunner(fail=fail),
        confirm={"seconds": 0.3, "finalists": 1, "max_repeats": 8},
        limits={"grace_s": 0.2},
        budget={"trials": 4},
        sentinel_every=0,
    )
    assert result.verdict.interval is not None
    assert {len(c) for c in result.verdict.costs.values()} == {3}


def test_hardware_hours_are_a_time_limit_too() -> None:
    budget = Budget(seconds=100.0, gpu_hours=0.1)
    assert budget.seconds_left(10.0, devices=8) == pytest.approx(35.0)
    assert budget.seconds_left(90.0, devices=1) == pytest.approx(10.0)
    assert budget.seconds_left(900.0, devices=1) == 0.0
    assert Budget(seconds=None).seconds_left(5.0, devices=1) is None


def failing_from(number: int, interrupted_at: int = -1):
    def fail(configuration, plan):
        if plan.number == interrupted_at:
            raise KeyboardInterrupt
        return Outcome(Status.OOM, reason="oom") if plan.number >= number else None

    return fail


def test_failures_in_a_row_are_counted_over_a_resume(search: Search) -> None:
    """wandb/wandb#1655: a search that is started again and again does not fail for ever."""
    options = {"limits": {"consecutive_failures": 4}, "sentinel_every": 0}
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=failing_from(2, interrupted_at=4)), **options)
    result = search(SyntheticRunner(fail=failing_from(2)), **options)
    assert result.exit_code == 3
    failed = [t.number for t in result.trials if t.status is Status.OOM]
    assert failed[:4] == [2, 3, 4, 5]
    assert {t.purpose for t in result.trials if t.number > 5} == {Purpose.CONFIRM}


def baseline_fails(status=Status.CRASH, reason="rank 0: FileNotFoundError: no such data"):
    def fail(configuration, plan):
        first = plan.purpose is Purpose.BASELINE
        return Outcome(status, reason=reason, log_path="logs/0000/rank0.log") if first else None

    return fail


@pytest.mark.parametrize("status", [Status.CRASH, Status.INVALID, Status.TIMEOUT, Status.DIVERGED])
def test_a_baseline_that_fails_ends_the_search(search: Search, status: Status) -> None:
    """There is nothing to compare with, and what is tried would fail alike."""
    result = search(SyntheticRunner(fail=baseline_fails(status)))
    assert result.exit_code == 1
    assert [t.number for t in result.trials] == [0]
    said = f"the baseline failed: {status}, rank 0: FileNotFoundError: no such data"
    assert result.reason == said
    assert f"warning: search ended: {said}" in search.view.text
    assert "no such data; full log of trial 0: logs/0000/rank0.log. " in result.verdict.reason
    asks = "raise limits.trial_s=" if status is Status.TIMEOUT else "the same command again"
    assert asks in result.verdict.reason
    assert not (result.run_dir / "best").exists()


def test_one_that_failed_before_a_kill_ends_it_too(search: Search) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfsearch.pipeline.baseline.BreakerError", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            search(SyntheticRunner(fail=baseline_fails()))
    result = search()
    assert search.runner.plans == []
    assert (result.exit_code, len(result.trials)) == (1, 1)


def test_one_that_failed_is_run_again_where_that_is_asked_for(search: Search) -> None:
    search(SyntheticRunner(fail=baseline_fails()))
    again = search(resume="failed")
    assert again.trials[0].status is Status.OK
    assert again.exit_code == 0


def test_one_that_does_not_fit_is_left_to_the_limit(search: Search) -> None:
    """Another configuration may."""
    result = search(SyntheticRunner(fail=lambda c, p: Outcome(Status.OOM, reason="oom")))
    assert "limits.consecutive_failures=8" in result.reason


def test_a_stop_at_the_first_failure_holds_over_a_resume(search: Search) -> None:
    def killed_after(name, **data):
        event = append(name, **data)
        if name == "told" and data["trial"] == 2:
            raise KeyboardInterrupt
        return event

    from perfsearch.core.journal import Journal

    append = None
    real = Journal.append

    def patched(self, name, **data):
        nonlocal append
        append = real.__get__(self)
        return killed_after(name, **data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", patched)
        with pytest.raises(KeyboardInterrupt):
            search(SyntheticRunner(fail=failing_from(2)), on_failure="stop")
    result = search(on_failure="stop")
    assert result.exit_code == 3
    assert search.runner.plans == [] or all(
        p.purpose is Purpose.CONFIRM for p in search.runner.plans
    )


def test_who_is_killed_again_and_again_is_not_to_blame(search: Search) -> None:
    def killed(configuration, plan):
        if plan.number == 3:
            return Outcome(Status.KILLED, reason="rank 1 was ended by SIGKILL")
        return None

    result = search(SyntheticRunner(fail=killed))
    trial = next(t for t in result.trials if t.number == 3)
    assert trial.status is Status.KILLED
    assert trial.cost is None
    assert not trial.status.is_failure
    assert sum(p.number == 3 for p in search.runner.plans) == 3
