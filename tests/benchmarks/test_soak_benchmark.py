"""What the soak counts, and one short episode of it."""

import os
import random
import socket
import sqlite3
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import _soak_faults  # noqa: E402
import soak  # noqa: E402
from _fault_common import Fault  # noqa: E402
from _soak_faults import KINDS, Strike, Striker, draw_strikes  # noqa: E402
from _soak_jobs import JOBS  # noqa: E402
from _soak_room import Reading, Room, check_left, read_memory, slope_kib, state_of  # noqa: E402

from perfsearch.core.journal import Journal  # noqa: E402


@pytest.fixture
def room(short_tmp):
    directory = Path(short_tmp)
    made = Room(*(directory / name for name in ("work", "tmp", "shm")), apart=True)
    for place in (made.work, made.temporary, made.shared):
        place.mkdir()
    (made.work / "log.txt").write_text("mine\n")
    (made.work / "kept").mkdir()
    return made


def left(room, before, run_dirs=()):
    return {count: lines for count, lines in check_left(room, before, run_dirs).items() if lines}


def test_nothing_left_is_nothing_found(room):
    before = state_of(room.work)
    (room.work / "mlflow.db").write_text("the search's own")
    (room.work / "run").mkdir()
    (room.temporary / f"perfsearch-{os.getuid()}").mkdir()
    assert left(room, before, [room.work / "run"]) == {}


def test_what_is_left_is_counted_by_its_kind(room):
    before = state_of(room.work)
    (room.work / "log.txt").write_text("mine\nand a trial's\n")
    (room.work / "kept").rmdir()
    (room.work / "new.pt").touch()
    (room.temporary / "pymp-1").mkdir()
    (room.shared / "torch_1_2").touch()
    groups = room.work / "run" / "groups"
    groups.mkdir(parents=True)
    (groups / "abc.json").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(room.temporary / "s"))
        found = left(room, before, [room.work / "run"])
    assert found == {
        "files_changed": ["new.pt was made", "kept is gone", "log.txt: another content"],
        "sockets_left": ["s"],
        "shared_memory_left": ["torch_1_2"],
        "temporary_left": ["pymp-1", "run/groups", "run/groups/abc.json"],
    }


def rising(trials, behind=0, struck=0, more_kib=0.0):
    return [Reading(n, behind, struck, 1000.0 + 3.5 * n + more_kib) for n in trials]


def test_growth_is_told_from_start_backlog_faults_and_record():
    steady = rising(range(60, 200))
    assert slope_kib(steady) == pytest.approx(3.5)
    imports = rising(range(60), more_kib=-90_000)
    waiting = [Reading(n, 90, 0, 1000.0 + 250 * n) for n in range(100, 150)]
    after_a_fault = rising(range(200, 290), struck=1, more_kib=5000)
    record = rising(range(300, 345), struck=1, more_kib=90_000)
    course = [*imports, *steady, *waiting, *after_a_fault, *record]
    assert slope_kib(course) == pytest.approx(3.5)


def test_growth_is_not_read_off_few_trials():
    assert slope_kib([]) is None
    assert slope_kib(rising(range(60, 180))) is None
    assert slope_kib(rising(range(60, 300), behind=4)) is None


def test_a_controller_is_read_with_what_its_store_lacks(room):
    journal, database = room.work / "journal.jsonl", room.work / "mlflow.db"
    assert read_memory(os.getpid(), journal, database, 0) is None
    journal.write_text('{"event":"started"}\n{"event":"finished"}\n{"event":"finished"}\n')
    with sqlite3.connect(database) as store:
        store.execute("create table tags (key, run_uuid)")
        store.execute("insert into tags values ('perfsearch.trial', 'a')")
    store.close()
    found = read_memory(os.getpid(), journal, database, 2)
    assert (found.trials, found.behind, found.struck) == (2, 1, 2)
    own_kib = psutil.Process().memory_full_info().uss / 1024
    assert 0.5 * own_kib < found.kib < 1.5 * own_kib


def test_a_machine_that_cannot_be_struck_is_said_to_be_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_soak_faults, "_PIDS", tmp_path / "none")
    assert soak._look_around(tmp_path, None) is None
    said = capsys.readouterr().out
    assert said.count("not here:") == 3
    for words in ("mount", "no C compiler (cc, gcc, clang)", "no " + str(tmp_path / "none")):
        assert words in said
    (tmp_path / "odd.so").write_bytes(b"of another machine")
    assert soak._look_around(tmp_path, tmp_path / "odd.so") is None
    assert "odd.so does not change the clock" in capsys.readouterr().out


def test_clocks_that_cannot_jump_are_not_counted_as_struck(room):
    striker = Striker(room, os.getpid(), [Strike("clock", 0, 0.0, 0.1, seed=1)], clock=None)
    time.sleep(0.5)
    striker.stop()
    assert not striker.done
    assert striker.skipped == ["clock: clocks do not jump here"]


def test_a_fault_is_blamed_on_a_configuration_unless_it_was_tried_again(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", {})
    for trial, attempts in ((0, 1), (1, 3)):
        for _ in range(attempts):
            journal.append("started", trial=trial)
        journal.append("finished", trial={"number": trial})
    journal.close()
    allowed = soak.allowed_ends(tmp_path)
    assert allowed == {0: {"ok"}, 1: {"ok", "killed", "infrastructure"}}


def test_tracebacks_are_told_by_their_last_lines():
    said = "Traceback (most recent call last)"
    frames = '  File "a.py", line 1, in <module>\n    f()\n'
    output = f"-- search\n{said}:\n{frames}OSError: [Errno 24] no\ntrial 1\n{said}:\n{frames}"
    assert soak.tracebacks(output + "KeyboardInterrupt\n") == ["OSError: [Errno 24] no"]


def test_strikes_are_drawn_from_their_seed_alone():
    for job in JOBS.values():
        drawn = [draw_strikes(random.Random(7), job.kinds, job.events) for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert {strike.kind for strike in drawn[0]} <= set(job.kinds) <= set(KINDS)


def test_an_episode_is_read_back_as_it_was_written(tmp_path):
    episode = soak.Episode(Fault("replay", "soak", 0, 5), "event 1 + 0.5 s: SIGKILL", [-9, 0])
    episode.strikes, episode.findings = ["SIGKILL"], {"trials_lost": ["trial 3"]}
    store = tmp_path / "store.jsonl"
    store.write_text(f"{soak.json.dumps(episode.to_json())}\n{{torn")
    assert soak.load([store]) == [episode]
    page = soak.report([episode], "abc")
    assert "| trials lost | 1 |" in page
    assert "| SIGKILL | 1 |" in page
    assert "- replay 5 (event 1 + 0.5 s: SIGKILL)" in page


@pytest.mark.slow
def test_a_struck_replay_loses_and_leaves_nothing(monkeypatch):
    whole = JOBS["replay"]

    def short(work, draw):
        # trials that take a while, so that there is something to strike
        words = ("runner.real_time=0.1", "strategy=random", "budget.trials=4")
        return [*whole.make(work, draw), *words]

    def struck_early(draw, kinds, events):
        return [Strike("kill", 4, 0.0, 0.5, seed=draw.randrange(2**31))]

    monkeypatch.setitem(JOBS, "replay", replace(whole, make=short))
    monkeypatch.setattr(soak, "draw_strikes", struck_early)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp") as home:
        episode = soak.run_episode("replay", 5, Path(home), None)
    assert episode.findings == {}, soak.line_of(episode)
    assert episode.strikes, "nothing struck"
    assert episode.exit_codes[-1] == 0
