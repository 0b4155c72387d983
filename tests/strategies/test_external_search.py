"""Whole searches whose proposals come from a function, a program, or a person at a terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import perfsearch
from perfsearch.config.schema import validate
from perfsearch.core.hints import Hints
from perfsearch.pipeline.search import strategy_factory
from perfsearch.strategies.base import LOG
from perfsearch.strategies.external import External

WAIT_S = 600
"""Far longer than anything here takes."""

EXAMPLES = Path(__file__).parents[2] / "examples"

TABLE = """bucket,algorithm,status,samples_per_s,step_ms
1,ring,ok,10,9 9 9
2,ring,ok,12,8 8 8
4,ring,ok,20,4 4 4
8,ring,oom,,
1,tree,ok,10,9 9 9
2,tree,ok,10,9 9 9
"""

QUIET = {"tracking": {"enabled": False}, "confirm": {"finalists": 0}}


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    start = {"bucket": 1, "algorithm": "ring"}
    return {"name": "replay", "table": "table.csv", "baseline": start}


def words(*more):
    base = [
        "runner=replay",
        "runner.table=table.csv",
        "runner.baseline={bucket: 1,algorithm: ring}",
    ]
    base += ["strategy=external", "tracking.enabled=false", "confirm.finalists=0", "run_dir=run"]
    return [sys.executable, "-m", "perfsearch.cli.search", *base, *more]


def program(text):
    Path("proposer.py").write_text(text)
    return f"strategy.command=[{sys.executable},proposer.py]"


def trials(run_dir="run"):
    events = map(json.loads, (Path(run_dir) / "journal.jsonl").read_text().splitlines())
    found = [e["trial"] for e in events if e.get("event") == "finished"]
    return [t["configuration"] for t in found if t["purpose"] == "search"]


def test_a_function_from_python_is_told_of_each_trial_and_its_stop_ends_the_search(table):
    questions, left = [], [8, 4]

    def propose(question):
        questions.append(question)
        return {"configuration": {"bucket": left.pop(0)}} if left else None

    result = perfsearch.search("strategy.retries=0", runner=table, strategy=propose, **QUIET)
    assert result.exit_code == 0
    assert result.reason == "the proposer stopped"
    told = [[t["status"] for t in q["history"]] for q in questions]
    assert told == [["ok"], ["ok", "oom"], ["ok", "oom", "ok"]]
    assert [q["budget"]["trials"] for q in questions] == [25, 24, 23]
    assert questions[0]["budget"]["seconds"] <= 180
    written = (result.run_dir / "config.yaml").read_text()
    assert "propose" in written
    assert "retries: 0" in written


def test_a_broken_off_search_goes_on_with_what_was_measured(table):
    told = []

    def propose(question):
        told.append([t["configuration"]["bucket"] for t in question["history"]])
        if len(told) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return {"configuration": {"bucket": (2, 8, None, 4)[len(told) - 1]}}

    keys = {"runner": table, "strategy": propose, "budget": {"trials": 3}, "run_dir": "run"}
    with pytest.raises(KeyboardInterrupt):
        perfsearch.search(**keys, **QUIET)
    result = perfsearch.search(**keys, **QUIET)
    assert told == [[1], [1, 2], [1, 2, 8], [1, 2, 8]]
    assert [c["bucket"] for c in trials()] == [2, 8, 4]
    assert result.reason == "budget.trials=3 spent"


def test_a_program_that_dies_ends_a_search_in_one_line_and_what_was_found_is_confirmed(table):
    text = (
        "import json, sys\nsys.stdin.readline()\n"
        'print(json.dumps({"configuration": {"bucket": 4}}))\n'
        "sys.stdin.readline()\nraise SystemExit('out of ideas')\n"
    )
    command = words(program(text), "confirm.finalists=1", "confirm.max_repeats=3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "search ended" in line]
    assert "it ended with exit code 1: out of ideas" in line
    assert str(Path("run", LOG).absolute()) in line
    assert "Traceback" not in done.stdout + done.stderr
    assert json.loads(Path("run/best/summary.json").read_text())["knobs"]["bucket"] == 4


def test_the_example_of_twenty_lines_searches(table):
    command = f"strategy.command=[{sys.executable},{EXAMPLES / 'propose.py'}]"
    done = subprocess.run(words(command), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "search ended: space exhausted" in done.stdout
    assert {(c["bucket"], c["algorithm"]) for c in trials()} == {
        (2, "ring"), (4, "ring"), (8, "ring"), (1, "tree"), (2, "tree"),
    }  # fmt: skip
    code = (EXAMPLES / "propose.py").read_text().rpartition('"""')[2].strip().splitlines()
    assert len(code) <= 22


def test_a_person_is_asked_at_the_terminal(table):
    """The terminal is that of the whole command; its group is in front, as in a shell."""
    command = f"strategy.command=[{sys.executable},{EXAMPLES / 'ask_person.py'}]"
    here, there = os.openpty()
    name = os.ttyname(there)
    # the leader of a new session gets the first terminal that it opens
    shell = ["sh", "-c", f'exec "$@" <{name} >{name} 2>&1', "sh", *words(command)]
    process = subprocess.Popen(
        shell, start_new_session=True, env={**os.environ, "TERM": "xterm"}, stdin=subprocess.DEVNULL
    )
    seen = b""
    try:
        for typed in (b"buckets=4\n", b"bucket=4 algorithm=ring\n", b"\n"):
            seen = read_until(here, b"to stop: ", seen)
            os.write(here, typed)
        seen += read_until(here, b"the person has enough", b"")
        assert process.wait(WAIT_S) == 0, seen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(here)
        os.close(there)  # had it been closed before the shell opened it, there would be no terminal
    assert [c["bucket"] for c in trials()] == [4]
    assert b"configuration.buckets: no such knob" in seen


def read_until(descriptor, wanted, before):
    """What a terminal shows up to ``wanted``, after ``before``."""
    seen, end = b"", time.monotonic() + WAIT_S
    while wanted not in seen:
        assert time.monotonic() < end, seen
        seen += os.read(descriptor, 4096)
    return before + seen


def test_what_a_kill_leaves_of_a_program_is_ended_by_the_next_search(table, tmp_path):
    text = (
        "import os, sys, time\nsys.stdin.readline()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    killed = subprocess.Popen(words(program(text)), stdout=subprocess.DEVNULL)
    pid = wait_for_pid(tmp_path / "pid")
    left = psutil.Process(pid)
    killed.kill()
    killed.wait()
    assert left.is_running()
    command = program('print(\'{"stop": ""}\')')
    done = subprocess.run(words(command), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    left.wait(10)


def test_an_interrupt_ends_the_program_with_the_search(table, tmp_path):
    text = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.stdin.readline()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    search = subprocess.Popen(words(program(text)), stdout=subprocess.DEVNULL)
    left = psutil.Process(wait_for_pid(tmp_path / "pid"))
    search.send_signal(signal.SIGTERM)
    assert search.wait(WAIT_S) == 143
    assert not left.is_running()


def wait_for_pid(file):
    end = time.monotonic() + WAIT_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(file.read_text())


def test_it_chooses_by_itself_which_knobs_to_search_first():
    command = [sys.executable, str(EXAMPLES / "propose.py")]
    settings = validate(
        {
            "runner": {"name": "ddp", "knobs": "auto"},
            "strategy": {"name": "external", "command": command},
            "workload": {"name": "mlp"},
        }
    )
    from support.strategy_spaces import mixed_space

    assert isinstance(strategy_factory(settings)(mixed_space(), Hints({})), External)
