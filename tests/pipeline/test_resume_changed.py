"""Resumes of searches that were changed, or of which only the failures are wanted."""

import os
from dataclasses import replace

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner, interrupt_at

from perfsearch.core.journal import read
from perfsearch.core.space import Space
from perfsearch.core.trial import Outcome, Purpose, Status


def narrower(values=(1, 2, 4), **options) -> SyntheticRunner:
    runner = SyntheticRunner(**options)
    knob = runner.space.by_name["bucket"]
    runner.space = Space([replace(knob, values=values), runner.space.by_name["view"]])
    return runner


@pytest.mark.parametrize("strategy", ["random", "bayes"])
def test_an_edited_list_of_choices(search: Search, strategy: str) -> None:
    """optuna/optuna#2564, optuna/optuna#2199, optuna/optuna#2328: no crash, no silent mixing."""
    options = {"strategy": {"name": strategy}, "budget": {"trials": 8}}
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(5)), **options)
    with pytest.raises(KeyboardInterrupt):
        search(narrower(fail=interrupt_at(7)), **options)
    assert "earlier trials still fit and are kept" in search.view.text
    assert not any(p.purpose is Purpose.BASELINE for p in search.runner.plans), "it still fits"
    result = search(narrower(), **options)
    assert "proposes otherwise" not in search.view.text
    assert "going on with" in search.view.text
    assert all(t.configuration["bucket"] <= 4 for t in result.trials)
    assert search.runner.plans[0].number == 7, "the unfinished trial is run again first"
    _, events = read(result.run_dir / "journal.jsonl")
    ended = [e.data["trial"]["number"] for e in events if e.name == "finished"]
    assert {n for n in ended if ended.count(n) > 1} <= {5, 7}, "only interrupted ones twice"


def test_a_baseline_that_changed_is_measured_again(search: Search) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(5)))
    other = SyntheticRunner()
    other.baseline = {"bucket": 2, "view": False}
    result = search(other)
    baseline = next(t for t in result.trials if t.purpose is Purpose.BASELINE)
    assert (baseline.number, baseline.configuration) == (0, other.baseline)
    assert result.exit_code == 0


def test_time_that_was_spent_counts_after_a_change(search: Search) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(5)))
    events = read(search.run_dir / "journal.jsonl")[1]
    spent = [e.data["search_seconds"] for e in events if e.name == "told"][-1]
    result = search(narrower(), budget={"trials": 12, "seconds": max(spent / 2, 1e-9)})
    assert "budget.seconds" in result.reason


def test_an_interrupted_trial_that_was_the_last_of_the_budget_is_run_again(search: Search) -> None:
    options = {"budget": {"trials": 3, "seconds": None}, "sentinel_every": 0}
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(3)), **options)
    result = search(**options)
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert [(t.number, t.status) for t in searched] == [(n, Status.OK) for n in (1, 2, 3)]


@pytest.mark.parametrize("number", [0, 3, 5, 9])
def test_every_purpose_keeps_its_number_when_interrupted(search: Search, number: int) -> None:
    """automl/hypersweeper#18: baseline, search, sentinel and confirmation go on under theirs."""
    options = {"budget": {"trials": 6, "seconds": None}, "sentinel_every": 4}
    calm = search(run_dir=str(search.run_dir) + "-calm", **options)
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(number)), **options)
    result = search(**options)
    assert search.runner.plans[0].number == number

    def story(trials):
        return sorted((t.number, t.purpose, str(t.configuration), t.cost) for t in trials)

    assert story(result.trials) == story(calm.trials)


def fail_where(status: Status, condition):
    return lambda c, p: Outcome(status, reason="as told") if condition(c, p) else None


def test_failed_only_means_the_baseline_and_failures_from_outside_too(search: Search) -> None:
    """ray-project/ray#16891: what is called failed in the record is what is run again."""

    def fail(configuration, plan):
        if plan.number == 0:
            return Outcome(Status.OOM, reason="out of memory")
        if plan.number == 2:
            return Outcome(Status.INFRASTRUCTURE, reason="address already in use")
        if plan.number == 3:
            return Outcome(Status.KILLED, reason="killed")
        return None

    first = search(SyntheticRunner(fail=fail), sentinel_every=0)
    failed = {t.number for t in first.trials if t.status.has_failed}
    assert failed == {0, 2, 3}
    second = search(resume="failed", sentinel_every=0)
    assert {p.number for p in search.runner.plans if p.purpose is not Purpose.CONFIRM} == failed
    assert not any(t.status.has_failed for t in second.trials)
    assert len(second.trials) >= len(first.trials)


def test_failed_only_is_not_stopped_by_the_failures_it_is_about(search: Search) -> None:
    """ray-project/ray#16891"""
    oom = fail_where(Status.OOM, lambda c, p: 3 <= p.number <= 6)
    options = {"limits": {"consecutive_failures": 4}, "sentinel_every": 0}
    assert search(SyntheticRunner(fail=oom), **options).exit_code == 3
    search(resume="failed", **options)
    rerun = [p.number for p in search.runner.plans if p.purpose is Purpose.SEARCH]
    assert rerun == [3, 4, 5, 6]


def test_never_more_than_one_trial_at_a_time(search: Search) -> None:
    """ray-project/ray#40652: nothing runs side by side, after a resume either."""
    alive, most = 0, 0

    class Counting(SyntheticRunner):
        def measure(self, configuration, plan):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            try:
                return super().measure(configuration, plan)
            finally:
                alive -= 1

    with pytest.raises(KeyboardInterrupt):
        search(Counting(fail=interrupt_at(4)))
    search(Counting())
    assert (alive, most) == (0, 1)


def test_the_numbered_directories(search: Search) -> None:
    """automl/hypersweeper#18: finished searches are left alone, unfinished ones gone on with."""
    first = search()
    kept = {p: p.read_bytes() for p in first.run_dir.rglob("*") if p.is_file()}
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(3)))
    second = search()
    assert second.run_dir.name == "run-2"
    assert search.runner.plans[0].number == 3
    assert search.runner.opened == second.run_dir
    assert search().run_dir.name == "run-3"
    changed = [p for p, old in kept.items() if p.name != ".lock" and p.read_bytes() != old]
    assert changed == []


def test_a_full_disk_at_any_moment_is_told_and_gone_on_from(search: Search, monkeypatch) -> None:
    from perfsearch.pipeline import record
    from perfsearch.tracking import export

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    for place in ((export, "write_config"), (record.report, "write_report")):
        monkeypatch.setattr(*place, full)
        result = search()
        assert result.exit_code == 3
        assert "No space left" in search.view.text
        assert search.runner.closed
        monkeypatch.undo()
    assert search().exit_code == 0
    assert search.run_dir == search.runner.opened


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device"), "Free some space, then give the same command"),
        (OSError(24, "Too many open files"), "ulimit -n"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "MemoryError. There is no memory left: end other processes"),
    ],
)
def test_what_the_machine_has_no_more_of_is_told_and_gone_on_from(
    search: Search, monkeypatch, error, says
) -> None:
    """Found by benchmarks/soak.py: a traceback, when a command began or in the middle of it."""
    from perfsearch.pipeline import record

    def lacking(*arguments, **options):
        raise error

    for place in ((SyntheticRunner, "open"), (record, "close_record")):
        monkeypatch.setattr(*place, lacking)
        result = search()
        assert (result.exit_code, result.run_dir) == (3, search.run_dir)
        assert says in search.view.text
        assert search.runner.closed
        monkeypatch.undo()
    assert search().exit_code == 0


def test_processes_are_ended_before_the_view_is(search: Search) -> None:
    """Nothing holds a GPU while MLflow is being waited for."""
    seen = []

    class Late(SyntheticRunner):
        def close(self):
            seen.append(search.tracker.status)
            super().close()

    with pytest.raises(KeyboardInterrupt):
        search(Late(fail=interrupt_at(2)))
    assert seen[0] == ""
    assert search.tracker.status == "KILLED"


def test_a_directory_that_is_removed_or_moved_away_ends_the_search(search: Search) -> None:
    away = search.run_dir.with_name("away")

    def move(number: int) -> SyntheticRunner:
        def fail(configuration, plan):
            if plan.number == number:
                search.run_dir.rename(away)

        return SyntheticRunner(fail=fail)

    result = search(move(3))
    assert (result.exit_code, search.runner.closed) == (3, True)
    assert "was removed or moved away while the search ran. Put the directory" in search.view.text
    assert not search.run_dir.exists(), "it is not made again"
    assert max(plan.number for plan in search.runner.plans) == 3
    away.rename(search.run_dir)
    assert search().exit_code == 0
    numbers = [t.number for t in search().trials]
    assert numbers == sorted(set(numbers))


def test_a_search_in_a_directory_whose_name_is_no_text(search: Search) -> None:
    search.run_dir = search.run_dir.with_name(os.fsdecode(b"caf\xe9"))
    result = search()
    assert (result.exit_code, result.run_dir) == (0, search.run_dir)
    assert "caf\\udce9" in (search.run_dir / "report.html").read_text(encoding="utf-8")


def test_a_search_goes_on_where_the_current_directory_is_removed(
    search: Search, tmp_path, monkeypatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)

    def remove(configuration, plan):
        if plan.number == 2:
            gone.rmdir()

    result = search(SyntheticRunner(fail=remove))
    assert result.exit_code == 0
    assert (search.run_dir / "report.html").exists()
    assert not gone.exists()


def test_what_ended_a_search_is_told_and_not_what_its_end_lacks(search: Search) -> None:
    """Found by benchmarks/faults.py: a traceback on a full disk, of which nothing can be ended."""

    class Full(SyntheticRunner):
        lacks = True

        def close(self):
            lacks, self.lacks = self.lacks, False
            if lacks:
                raise OSError(28, "No space left on device")
            super().close()

    def gone(configuration, plan):
        if plan.number == 2:
            (search.run_dir / "journal.jsonl").unlink()

    result = search(Full(fail=gone))
    assert (result.exit_code, search.runner.closed) == (3, True)
    assert "was removed or moved away" in search.view.text
