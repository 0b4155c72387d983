import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner, interrupt_at

from perfsearch.core.hints import ChainResult
from perfsearch.core.journal import Journal, read
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status, Trial
from perfsearch.pipeline.resume import RefusedError
from perfsearch.strategies.random import Random
from perfsearch.workers.processes import members, record_group

DRIVER = Path(__file__).parents[1] / "support" / "kill_driver.py"


def drive(run_dir: Path, strategy: str, *kills: str) -> list[int]:
    command = [sys.executable, str(DRIVER), str(run_dir), strategy, *kills]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=True)
    return [int(code) for code in done.stdout.split()]


def story(run_dir: Path) -> tuple[list, str]:
    """Trials by number without their wall times, and the verdict."""
    _, events = read(run_dir / "journal.jsonl")
    trials = {}
    for event in events:
        if event.name == "finished":
            trial = event.data["trial"]
            trials[trial["number"]] = [
                trial[k] for k in ("number", "configuration", "purpose", "status", "cost")
            ]
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    return [trials[n] for n in sorted(trials)], summary["verdict"]


@pytest.mark.slow
def test_a_search_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """optuna/optuna#3215: SIGKILL before, in and after every kind of event, over and over.

    A strategy with more of a state is killed so in ``test_resume_command.py``.
    """
    assert drive(tmp_path / "calm", "random") == [0]
    _, events = read(tmp_path / "calm" / "journal.jsonl")
    # Each kill advances the journal, so later event numbers still lie ahead of it.
    points, phases = [], ["before", "middle", "after"]
    names = [e.name for e in events]
    kinds = "opened asked started finished told confirmed summarised ended"
    for kind in kinds.split():
        places = [i + 1 for i, name in enumerate(names) if name == kind]
        chosen = places[:: max(1, len(places) // 3)][:3]
        points += [(at, phase) for at, phase in zip(chosen * 3, phases, strict=False)]
    points = sorted(set(points), key=lambda p: (p[0], phases.index(p[1])))
    assert len(points) >= 20
    codes = drive(tmp_path / "killed", "random", *(f"{at}:{phase}" for at, phase in points))
    assert codes.count(-signal.SIGKILL) >= 20
    assert set(codes) == {-signal.SIGKILL, 0}
    assert story(tmp_path / "killed") == story(tmp_path / "calm")


def test_an_interrupt_keeps_the_finished_trials_and_the_same_command_goes_on(
    search: Search,
) -> None:
    """QUARK-framework/QUARK#111: Ctrl-C at trial k keeps and shows the k finished ones."""
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    assert search.runner.closed
    assert search.tracker.status == "KILLED"
    assert "interrupted after 4 trials" in search.view.verdict
    assert [t.status for t in search.tracker.trials][-1] is Status.INTERRUPTED
    result = search()
    assert sorted(t.number for t in result.trials) == list(range(len(result.trials)))
    first = search.runner.plans[0]
    assert first.number == 4, "the unfinished trial is run again first"
    assert not any(t.status is Status.INTERRUPTED for t in result.trials)


def test_a_finished_search_is_followed_by_a_numbered_neighbour(search: Search) -> None:
    """automl/hypersweeper#18: no file of an earlier run changes."""
    first = search()
    before = {p: p.read_bytes() for p in first.run_dir.rglob("*") if p.is_file()}
    second, third = search(), search()
    assert second.run_dir.name == "run-2"
    assert third.run_dir.name == "run-3"
    assert {p: p.read_bytes() for p in before if p.name != ".lock"} == {
        p: b for p, b in before.items() if p.name != ".lock"
    }


def test_resume_never_starts_anew(search: Search) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    assert search(resume="never").run_dir.name == "run-2"


KILLED = """
import os, signal, subprocess, sys, uuid
from pathlib import Path
from perfsearch.workers.messages import TOKEN_VARIABLE
from perfsearch.workers.processes import record_group

token = uuid.uuid4().hex
record_group(Path(sys.argv[1]), token, Path(sys.argv[1]) / "gone")
marked = {**os.environ, TOKEN_VARIABLE: token}
subprocess.Popen(["sleep", "60"], env=marked, stdout=subprocess.DEVNULL)
print(token, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_anew_ends_what_a_killed_search_beside_it_left(search: Search) -> None:
    left = search().run_dir
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(left)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    record_group(left, "ours", left / "gone")  # of a search beside this one, in the same process
    assert len(members(killed.stdout.strip())) == 1
    assert search(resume="never").run_dir.name == "run-2"
    assert members(killed.stdout.strip()) == []
    assert [path.name for path in (left / "groups").iterdir()] == ["ours.json"]


def test_resume_failed_runs_exactly_the_failed_ones(search: Search) -> None:
    """ray-project/ray#16891."""

    def oom(configuration, plan):
        return Outcome(Status.OOM, reason="oom") if configuration["bucket"] == 8 else None

    first = search(SyntheticRunner(fail=oom))
    failed = {t.number for t in first.trials if t.status is Status.OOM}
    assert len(failed) == 2
    second = search(resume="failed")
    assert second.run_dir == first.run_dir
    rerun = {p.number for p in search.runner.plans if p.purpose is Purpose.SEARCH}
    assert rerun == failed
    assert all(t.status is Status.OK for t in second.trials if t.number in failed)


def test_another_machine_is_refused_unless_forced(search: Search) -> None:
    """flagos-ai/FlagGems#5832: results count only for the model, device and versions they had."""
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4), identity={"gpu": "A100", "model": "gpt"}))
    other = {"gpu": "H100", "model": "gpt"}
    with pytest.raises(RefusedError, match=r"gpu=A100, and this is H100.*resume_force=\[gpu\]"):
        search(SyntheticRunner(identity=other))
    result = search(SyntheticRunner(identity=other), resume_force=["gpu"])
    assert result.exit_code == 0


def test_a_changed_space_keeps_what_still_fits_and_says_how_many(search: Search) -> None:
    """optuna/optuna#2564."""
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(7)))
    narrower = SyntheticRunner()
    knob = narrower.space.by_name["bucket"]
    from dataclasses import replace

    from perfsearch.core.space import Space

    narrower.space = Space([replace(knob, values=(1, 2, 4)), narrower.space.by_name["view"]])
    result = search(narrower)
    assert "earlier trials still fit and are kept" in search.view.text
    assert all(t.configuration["bucket"] <= 4 for t in result.trials)
    numbers = [p.number for p in narrower.plans]
    assert len(numbers) == len(set(numbers))


def test_a_torn_last_line_is_dropped_with_a_warning(search: Search) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    with (search.run_dir / "journal.jsonl").open("a") as file:
        file.write('{"n": 99, "event": "fin')
    search()
    assert "dropped a line that was torn" in search.view.text


def test_an_unknown_journal_version_is_refused(search: Search) -> None:
    from perfsearch.core.journal import JournalError

    search.run_dir.mkdir()
    (search.run_dir / "journal.jsonl").write_text('{"schema": 7}\n')
    with pytest.raises(JournalError, match="journal schema 7"):
        search()


def test_an_unknown_status_is_refused_without_a_promise(search: Search) -> None:
    from perfsearch.core.journal import JournalError

    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    journal = search.run_dir / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"status":"ok"', '"status":"fine"', 1))
    with pytest.raises(JournalError, match="status=fine: allowed: ok"):
        search()
    assert "goes on from here" not in search.view.text
    assert search.tracker.status == "FAILED"


def test_a_full_disk_ends_the_search_and_keeps_a_valid_journal(search: Search, monkeypatch) -> None:
    real = Journal._write

    def full(self, record):
        if record.get("n", 0) >= 9:
            raise OSError(28, "No space left on device")
        real(self, record)

    monkeypatch.setattr(Journal, "_write", full)
    assert search().exit_code == 3
    assert "No space left" in search.view.text
    assert search.runner.closed
    monkeypatch.undo()
    assert search().exit_code == 0


def test_two_of_the_same_search_do_not_mix(search: Search) -> None:
    from perfsearch.pipeline.resume import LockError, run_directory_lock

    search.run_dir.mkdir()
    with run_directory_lock(search.run_dir), pytest.raises(LockError, match="is running this"):
        search()


def test_failed_trials_of_an_unfinished_search_are_not_run_again_yet(search: Search) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    before = (search.run_dir / "journal.jsonl").read_bytes()
    with pytest.raises(RefusedError, match="the search is not finished"):
        search(resume="failed")
    assert (search.run_dir / "journal.jsonl").read_bytes() == before


def test_there_may_be_nothing_to_run_again(search: Search) -> None:
    search()
    with pytest.raises(RefusedError, match="no trial of it failed"):
        search(resume="failed")


def test_what_is_forced_must_be_something_that_is_compared(search: Search) -> None:
    with pytest.raises(RefusedError, match=r"resume_force=\[modell\].*Did you mean 'model'"):
        search(resume_force=["modell"])


_UNMEASURED = Trial(0, {}, Purpose.SEARCH, Status.OK).to_json()


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("finished", {"trial": {"number": 1}}),
        ("finished", {"trial": {**_UNMEASURED, "number": 1}}),
        ("told", {"search_seconds": "x"}),
        ("asked", {"configuration": 3}),
        ("started", {"purpose": "whim"}),
    ],
)
def test_an_event_that_says_something_odd_is_refused_by_its_line(
    search: Search, event: str, change: dict
) -> None:
    from perfsearch.core.journal import JournalError

    with pytest.raises(KeyboardInterrupt):
        search(SyntheticRunner(fail=interrupt_at(4)))
    journal = search.run_dir / "journal.jsonl"
    lines = journal.read_text().splitlines()
    place = max(i for i, line in enumerate(lines) if f'"event":"{event}"' in line)
    lines[place] = json.dumps({**json.loads(lines[place]), **change})
    journal.write_text("\n".join(lines) + "\n")
    with pytest.raises(JournalError, match=rf"journal.jsonl: line {place + 1} \({event}\)"):
        search()


@pytest.mark.parametrize("steps", [[-1.0, 1.0], [float("nan")]])
def test_steps_that_no_clock_shows_are_refused(steps: list) -> None:
    trial = Trial(1, {}, Purpose.SEARCH, Status.OK, Measurement([1.0], 1)).to_json()
    trial["measurement"]["step_seconds"] = steps
    with pytest.raises(ValueError, match="step_seconds="):
        Trial.from_json(trial)


def test_the_directory_that_was_named_has_its_failed_trials_run_again(search: Search) -> None:
    def oom(configuration, plan):
        return Outcome(Status.OOM, reason="oom") if plan.number == 2 else None

    first = search(SyntheticRunner(fail=oom))
    later = search()  # a whole one, in a numbered neighbour
    assert later.run_dir != first.run_dir
    again = search(resume="failed")
    assert again.run_dir == first.run_dir
    assert "running the 1 failed trials again" in search.view.text


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.CRASH, "rank 0: FactoryError: workload.factory=a:b: no"),
        (Status.INVALID, "the script made 64 steps and ended, before it could be measured. Give"),
    ],
)
def test_a_job_that_cannot_be_measured_ends_the_search_until_it_is_mended(
    search: Search, status: Status, reason: str
) -> None:
    from perfsearch.core.errors import BadInputError

    def broken(configuration, plan):
        return Outcome(status, reason=reason)

    with pytest.raises(BadInputError, match=re.escape(reason)):
        search(SyntheticRunner(fail=broken))
    assert [t.number for t in search.tracker.trials] == [0]
    result = search()
    assert result.exit_code == 0
    assert [t.number for t in result.trials].count(0) == 1


class Chaining(Random):
    """Runs a chain over simulated configurations before it proposes the first one."""

    def ask(self):
        if not self.chained:
            self.chain_results.append(
                ChainResult([], [(1, 0.3, 0.2, 0.1), (2, 0.3, math.inf, 0.1)], "chained")
            )
            self.chained = True
        return super().ask()

    chained = False


def test_a_chain_is_recorded_once_however_often_a_search_is_resumed(
    search: Search,
) -> None:
    search.strategy = Chaining
    for number in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            search(SyntheticRunner(fail=interrupt_at(number)))
    search()
    _, events = read(search.run_dir / "journal.jsonl")
    (chain,) = [event.data["series"] for event in events if event.name == "simulated"]
    assert chain == {
        "simulated/cur_ms": [[1, 300.0], [2, 300.0]],
        "simulated/next_ms": [[1, 200.0]],
        "simulated/best_ms": [[1, 100.0], [2, 100.0]],
    }
