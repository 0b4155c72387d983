"""What the soak counts, and one short episode of it."""

import os
import random
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import soak  # noqa: E402
from _fault_common import Fault  # noqa: E402
from _soak_faults import KINDS, Strike, draw_strikes  # noqa: E402
from _soak_jobs import JOBS  # noqa: E402
from _soak_room import Room, check_left, slope_kib, state_of  # noqa: E402

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


def test_growth_is_told_from_what_a_start_takes():
    rising = [(trial, 1000.0 + 3.5 * trial + (500 if trial > 10 else 0)) for trial in range(100)]
    assert slope_kib(rising) == pytest.approx(3.5)
    assert slope_kib([*rising, *((99, 90_000.0) for _ in range(50))]) == pytest.approx(3.5)
    assert slope_kib([(trial, 1000.0) for trial in range(100)]) == pytest.approx(0.0)
    assert slope_kib([]) == slope_kib([(0, 1.0)]) == 0.0


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
