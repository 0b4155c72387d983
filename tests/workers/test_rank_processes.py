"""Ranks by what they told of themselves: one device each, and still there."""

import os
import signal
import subprocess
import sys

from perfsearch.workers import processes
from perfsearch.workers.group import RankProcesses

HOST = os.uname().nodename


def told(pid, device="GPU-a", host=HOST):
    return {"host": host, "device": device, "pid": pid, "started": processes.started_at(pid)}


def test_two_ranks_on_one_device_are_named_and_two_hosts_may_call_theirs_alike():
    own = os.getpid()
    ranks = [told(own), told(own, "GPU-b"), told(own, "GPU-b", "elsewhere"), told(own, "GPU-b")]
    assert RankProcesses(ranks[:3]).shared_device() is None
    assert RankProcesses(ranks).shared_device() == ("ranks 1 and 3 are on the same device GPU-b", 3)


def test_a_rank_that_is_gone_is_told_from_those_that_run():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks_told = RankProcesses([told(os.getpid()), told(child.pid)])
    assert ranks_told.ended() == []
    child.communicate(b"\n", timeout=60)
    assert [end.rank for end in ranks_told.ended()] == [1]
    assert ranks_told.some_run()


def test_ranks_that_the_launcher_has_ended_come_after_the_one_that_was_killed():
    asleep = [sys.executable, "-c", "input()"]
    children = [subprocess.Popen(asleep, stdin=subprocess.PIPE) for _ in range(2)]
    ranks = RankProcesses([told(child.pid) for child in children])
    children[0].terminate()
    children[1].kill()
    for child in children:  # without asking how it ended
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ends = [(end.rank, end.exit_code) for end in ranks.ended()]
    for child in children:
        child.communicate()
    assert ends == [(1, -signal.SIGKILL), (0, -signal.SIGTERM)]


def test_how_a_rank_ended_is_known_once_its_launcher_has_taken_note():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = RankProcesses([told(child.pid)])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [end.exit_code for end in ranks.ended()] == [-signal.SIGKILL]
    child.communicate()  # from here on the system knows nothing of it
    assert [end.exit_code for end in ranks.ended()] == [-signal.SIGKILL]


def test_ranks_of_other_nodes_are_not_looked_for_here():
    """Hosts may be called alike, as containers often are."""
    stranger = {**told(os.getpid()), "pid": 2**22 + 1}
    assert len(RankProcesses([stranger]).ended()) == 1
    assert RankProcesses([{**stranger, "node": 1}]).ended() == []
