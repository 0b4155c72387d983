"""A session that is asked for one configuration after the other, on a known surface."""

import csv
import json
import os
import socket
import stat
import threading
from contextlib import contextmanager

import pytest
from support.small_search import make_settings
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch.core.journal import JOURNAL
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Outcome, Purpose, Status
from perfsearch.pipeline.search import search as run_session
from perfsearch.pipeline.session_socket import SOCKET, NoSessionError, SessionSocket, ask, is_open
from perfsearch.pipeline.tries import Tries
from perfsearch.strategies._nothing import Nothing


class Open:
    """A session under way in a thread, and what became of it."""

    def __init__(self, run_dir, runner, idle_s=60.0):
        self.run_dir, self.runner = run_dir, runner
        self.view, self.tracker = KeptView(), KeptTracker()
        self.result = None
        self.ready = threading.Event()
        shown = self.view.stage

        def stage(name, detail=""):
            shown(name, detail)
            if name == "session":
                self.ready.set()

        self.view.stage = stage
        settings = make_settings(run_dir=str(run_dir), resume="never", seed=3)

        def run():
            self.result = run_session(
                settings,
                runner,
                Nothing,
                self.view,
                lambda settings, run_dir, search_id: self.tracker,
                Tries(idle_s),
            )
            self.ready.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert self.ready.wait(60)

    def __call__(self, repeats=1, **knobs):
        return ask(self.run_dir, {"op": "try", "knobs": knobs, "repeats": repeats})

    def end(self):
        ask(self.run_dir, {"op": "end"})
        self.thread.join(60)
        return self.result


@contextmanager
def session(run_dir, runner=None):
    opened = Open(run_dir, runner or SyntheticRunner())
    try:
        yield opened
    finally:
        if opened.thread.is_alive():
            opened.end()


def test_one_try_is_read_beside_the_baseline_and_claims_nothing(tmp_path):
    with session(tmp_path / "run") as tried:
        found = tried(bucket=32)
        assert found["ratio"] == pytest.approx(1 / 0.8, rel=0.05)
        assert found["interval"] is None
        assert "one reading of each: it shows no gain" in found["said"]
        assert "--repeats 6 bucket=32" in found["said"]
        assert found["configuration"] == {"bucket": 32, "view": False}
        assert found["tried"]["rate"] > found["baseline"]["rate"]
        result = tried.end()
    purposes = [trial.purpose for trial in result.trials]
    assert sorted(purposes) == [Purpose.BASELINE, Purpose.SEARCH, Purpose.SENTINEL]


def test_repeats_give_an_interval(tmp_path):
    with session(tmp_path / "run") as tried:
        found = tried(repeats=6, bucket=32)
        low, high = found["interval"]["low"], found["interval"]["high"]
        assert 1 < low < found["ratio"] < high
        assert (
            found["said"].startswith("at least ") and "6 pairs of blocks of steps" in found["said"]
        )
        equal = tried(repeats=6, bucket=1)
        assert equal["interval"]["low"] < 1 < equal["interval"]["high"]
        assert "no difference shown" in equal["said"]


def test_everything_is_on_record(tmp_path):
    with session(tmp_path / "run") as tried:
        tried(repeats=2, bucket=32)
        tried(view=True)
        tried.end()
    events = [json.loads(line) for line in (tmp_path / "run" / JOURNAL).read_text().splitlines()]
    names = [event.get("event") for event in events]
    assert names.count("asked") == 2 and names.count("confirmed") == 1
    assert names[-2:] == ["summarised", "ended"]
    purposes = [e["purpose"] for e in events if e.get("event") == "started"]
    assert purposes.count("search") == 2, "the first reading of each configuration"
    assert purposes.count("repeat") == 1 and purposes.count("sentinel") == 3
    assert len(tried.tracker.trials) == len(purposes)
    assert tried.tracker.status == "FINISHED"
    with (tmp_path / "run" / "trials.csv").open() as file:
        assert len(list(csv.reader(file))) == len(purposes) + 1
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "best").exists()
    assert tried.runner.closed


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"buket": 2}, "runner.knobs.buket: no such knob. Did you mean 'bucket'?"),
        ({"bucket": 64}, "runner.knobs.bucket=64: allowed: 1, 2, 4, 8, 16, 32"),
        ({"view": 3}, "runner.knobs.view=3: allowed: false, true"),
        ({"pin": 3}, "runner.knobs.pin=3: it is fixed to 5 in this session"),
        ({"gone": 3}, "runner.knobs.gone=3: no GPU is used. Leave the key out."),
        ({}, "nothing to try"),
    ],
)
def test_what_a_search_refuses_is_refused_and_costs_nothing(tmp_path, knobs, said):
    runner = SyntheticRunner()
    runner.pinned, runner.left_out = {"pin": 5}, {"gone": "no GPU is used"}
    with session(tmp_path / "run", runner) as tried:
        assert said in tried(**knobs)["error"]
        assert len(runner.plans) == 1


@pytest.mark.parametrize("repeats", [0, 101, 1.5, True, "2"])
def test_a_number_of_repeats_that_makes_no_sense_is_refused(tmp_path, repeats):
    with session(tmp_path / "run") as tried:
        assert f"repeats={repeats}: allowed" in tried(repeats=repeats, bucket=2)["error"]


def test_a_failure_is_typed_and_the_session_goes_on(tmp_path):
    def fail(configuration, plan):
        big = configuration["bucket"] == 32
        return Outcome(Status.OOM, reason="out of memory", log_path="rank0.log") if big else None

    with session(tmp_path / "run", SyntheticRunner(fail=fail)) as tried:
        found = tried(repeats=4, bucket=32)
        assert found["tried"]["status"] == "oom"
        assert (found["tried"]["reason"], found["tried"]["log"]) == ("out of memory", "rank0.log")
        assert found["ratio"] is None and found["interval"] is None
        assert len(found["tried"]["trials"]) == 1, "what failed is not started again and again"
        assert tried(bucket=16)["tried"]["status"] == "ok"


def test_what_arithmetic_refuses_is_not_started(tmp_path):
    runner = SyntheticRunner(screen=lambda c: "too large" if c["bucket"] == 32 else None)
    with session(tmp_path / "run", runner) as tried:
        found = tried(bucket=32)
        assert (found["tried"]["status"], found["tried"]["reason"]) == ("invalid", "too large")
        assert len(runner.plans) == 1


def test_where_the_baseline_does_not_fit_others_are_measured_without_a_ratio(tmp_path):
    def fail(configuration, plan):
        small = configuration["bucket"] == 1
        return Outcome(Status.OOM, reason="out of memory") if small else None

    with session(tmp_path / "run", SyntheticRunner(fail=fail)) as tried:
        found = tried(repeats=3, bucket=2)
        assert found["tried"]["status"] == "ok" and found["tried"]["rate"] > 0
        assert found["baseline"] is None and found["ratio"] is None


def test_a_job_that_does_not_run_opens_no_session(tmp_path):
    runner = SyntheticRunner(fail=lambda c, p: Outcome(Status.CRASH, reason="no module named x"))
    opened = Open(tmp_path / "run", runner)
    opened.thread.join(60)
    assert opened.result.exit_code is ExitCode.NO_TRIAL_SUCCEEDED
    assert "no module named x" in opened.result.reason
    assert not (tmp_path / "run" / SOCKET).exists()


def test_it_ends_when_nobody_asks(tmp_path):
    opened = Open(tmp_path / "run", SyntheticRunner(), idle_s=0.05)
    opened.thread.join(60)
    assert opened.result.exit_code is ExitCode.DONE
    assert opened.result.reason.startswith("nothing was tried for ")
    assert not (tmp_path / "run" / SOCKET).exists() and opened.runner.closed


# -----------------------------------------------------------------------------
# The socket.


def test_only_the_same_user_gets_in(tmp_path):
    with SessionSocket(tmp_path) as listener:
        assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o600
        assert is_open(tmp_path)
    assert not is_open(tmp_path)


def test_a_socket_that_a_kill_left_is_no_session_and_in_nobodys_way(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / SOCKET))
    left.close()
    with pytest.raises(NoSessionError, match="no session is open there"):
        ask(tmp_path, {"op": "end"})
    with SessionSocket(tmp_path):
        assert is_open(tmp_path)


def test_a_long_path_is_no_obstacle(tmp_path):
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    deep.mkdir(parents=True)
    with SessionSocket(deep) as listener:
        asked = threading.Thread(target=lambda: listener.wait(30).answer({"heard": True}))
        asked.start()
        assert ask(deep, {"op": "x"}) == {"heard": True}
        asked.join(30)


@pytest.mark.parametrize("said", [b"", b"no json\n", b"[1]\n", b'{"op": "en'])
def test_a_caller_who_makes_no_sense_or_leaves_does_not_end_the_session(tmp_path, said):
    with session(tmp_path / "run") as tried:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "run" / SOCKET))
            caller.sendall(said)
        with socket.socket(socket.AF_UNIX) as caller:  # leaves before the answer comes
            caller.connect(str(tmp_path / "run" / SOCKET))
            caller.sendall(b'{"op": "try", "knobs": {"bucket": 2}}\n')
        assert tried(bucket=4)["tried"]["status"] == "ok"
        assert len(tried.runner.plans) == 5, "what was asked for is measured all the same"
