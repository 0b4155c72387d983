"""Real ranks that fail in every way that one node without a GPU allows."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.knob import Numerics
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Status
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workers import processes
from perfsearch.workloads.spec import WorkloadSpec

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
LIMITS = Limits(startup_s=180, trial_s=60, grace_s=5)


class Bench:
    """A runner whose workload fails as told."""

    def __init__(self, directory, factory="faults:build", limits=LIMITS):
        self.fault = directory / "fault.json"
        self.directory = directory
        self.trials = 0
        environment = Environment(
            run_dir=directory,
            limits=limits,
            numerics=Numerics.ALTERING,
            variables={"PERFSEARCH_TEST_FAULT": str(self.fault), "NCCL_ALGO": "Tree"},
        )
        self.runner = DDP(
            DDP.Options(device="cpu", knobs={"dataloader_workers": [0, 1]}),
            WorkloadSpec("custom", factory=factory, global_batch=8),
            environment,
        )

    def measure(self, fault=None, time_limit_s=30.0, workers=0):
        self.fault.unlink(missing_ok=True)
        if fault:
            self.fault.write_text(json.dumps(fault))
        plan = Plan(
            number=self.trials,
            log_directory=self.directory / "logs" / str(self.trials),
            scored_seconds=0.05,
            time_limit_s=time_limit_s,
        )
        self.trials += 1
        return self.runner.measure({"dataloader_workers": workers}, plan)

    @property
    def token(self):
        return self.runner._pools.pools[0]._group.token

    def left(self, token):
        """Processes of a group that ended; the one that groups are forked from stays."""
        return processes.members(token, exclude=[self.runner._pools.pools[0]._preloaded.pid])


def is_gone(pid):
    """Whether a process has ended; where nobody reaps orphans, a zombie may remain."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def line_after(text):
    return (SUPPORT / "faults.py").read_text().partition(text)[0].count("\n") + 2


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    before = os.getcwd()
    os.chdir(SUPPORT)
    made = Bench(tmp_path_factory.mktemp("faults"))
    assert made.measure().status is Status.OK
    yield made
    made.runner.close()
    os.chdir(before)


@pytest.fixture
def warm(bench):
    """The bench with a group that is warm, and its first losses."""
    outcome = bench.measure()
    assert outcome.status is Status.OK, outcome.reason
    return bench


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (
            {"kind": "raise", "type": "RuntimeError", "message": "boom: CUDA error, misaligned"},
            Status.CRASH,
            "rank 1: RuntimeError: boom",
        ),
        (
            {"kind": "raise", "type": "RuntimeError", "message": "CUDA out of memory. Tried 2 GiB"},
            Status.OOM,
            "rank 1: RuntimeError: CUDA out of memory",
        ),
        (
            {"kind": "raise", "type": "MemoryError", "message": ""},
            Status.OOM,
            "rank 1: MemoryError",
        ),
        ({"kind": "rlimit"}, Status.OOM, "DefaultCPUAllocator"),
    ],
)
def test_an_exception_on_one_rank_leaves_the_group_warm(warm, fault, status, reason):
    """pytorch/pytorch#50820: rank 1 fails before a collective, rank 0 does not spin."""
    began = time.monotonic()
    outcome = warm.measure({**fault, "rank": 1})
    assert outcome.status is status
    assert reason in outcome.reason
    assert time.monotonic() - began < 15
    assert "Traceback" in Path(outcome.log_path).read_text()
    assert outcome.log_path.endswith("rank1.log")
    after = warm.measure()
    assert after.status is Status.OK
    assert not after.fresh_process


def test_state_does_not_depend_on_how_the_last_trial_ended(warm):
    """wandb/wandb#1567: trial n+1 starts as if trial n had not failed."""
    before = warm.measure().measurement.first_losses
    warm.measure({"kind": "raise", "type": "RuntimeError", "message": "boom", "rank": 0})
    assert warm.measure().measurement.first_losses == before


def test_a_killed_loader_process_is_no_crash_of_the_configuration(warm):
    outcome = warm.measure({"kind": "loader"}, workers=1)
    assert outcome.status is Status.KILLED
    assert "DataLoader worker" in outcome.reason
    assert not warm.measure(workers=1).fresh_process


@pytest.mark.parametrize("rank", [0, 1])
def test_environment_reaches_every_rank(warm, rank):
    """NVIDIA-NeMo/Speech#9449: a launcher of one's own ignored the environment that was set."""
    outcome = warm.measure({"kind": "tell", "variable": "NCCL_ALGO", "rank": rank})
    assert outcome.reason == f"rank {rank}: RuntimeError: rank {rank} has Tree"
    assert "NCCL_ALGO" not in os.environ


def test_nan_is_divergence(warm):
    outcome = warm.measure({"kind": "nan"})
    assert outcome.status is Status.DIVERGED
    assert "nan" in outcome.reason


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ({"kind": "exit", "code": 3}, Status.CRASH, "rank 1 ended with exit code 3"),
        ({"kind": "exit", "code": 0}, Status.CRASH, "rank 1 ended with exit code 0"),
        ({"kind": "signal", "signal": "SIGKILL"}, Status.KILLED, "rank 1 was ended by SIGKILL"),
    ],
)
def test_a_rank_that_dies_takes_the_trial_down(warm, fault, status, reason):
    token = warm.token
    outcome = warm.measure({**fault, "rank": 1})
    assert (outcome.status, outcome.reason) == (status, reason)
    assert warm.left(token) == []


def test_a_killed_rank_is_seen_though_its_loader_still_holds_on(warm):
    """The launcher sees the end of a rank only when the processes that it forked have ended."""
    outcome = warm.measure({"kind": "signal", "signal": "SIGKILL", "rank": 1}, workers=1)
    assert (outcome.status, outcome.reason) == (Status.KILLED, "rank 1 was ended by SIGKILL")


def test_a_hang_is_cut_with_its_grandchildren(warm):
    """morganlinton/VulcanBench#112, cfengine/core#6305, deepspeedai/DeepSpeed#4100: all of it."""
    token = warm.token
    began = time.monotonic()
    outcome = warm.measure({"kind": "grandchild", "rank": 0}, time_limit_s=4.0)
    assert outcome.status is Status.TIMEOUT
    where = f"rank 0 stands at faults.py:{line_after('leave_grandchild(path.')} in strike"
    assert outcome.reason.startswith(f"the trial took longer than 4 s; {where}, rank 1 at")
    assert time.monotonic() - began < 4 + LIMITS.grace_s + 5
    grandchild = int(warm.fault.with_suffix(".pid").read_text())
    assert is_gone(grandchild)
    assert warm.left(token) == []


def test_a_start_that_hangs_says_where_each_rank_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(SUPPORT)
    for startup_s in (15, 60, 240):  # as long as this machine takes to get the ranks so far
        limits = Limits(startup_s=startup_s, grace_s=5)
        other = Bench(tmp_path, factory="faults:stuck", limits=limits)
        outcome = other.measure()
        other.runner.close()
        if "stand" in outcome.reason:
            break
    where = f"ranks 0 and 1 stand at faults.py:{line_after('def stuck():')} in stuck"
    reason = f"start-up took longer than {startup_s} s; {where}"
    assert (outcome.status, outcome.reason) == (Status.INFRASTRUCTURE, reason)


def test_ranks_that_do_not_recover_are_ended_after_the_grace_time(warm):
    token = warm.token
    began = time.monotonic()
    outcome = warm.measure({"kind": "raise while others hang"}, time_limit_s=60.0)
    assert (outcome.status, outcome.reason) == (Status.CRASH, "rank 1: RuntimeError: boom")
    assert time.monotonic() - began < LIMITS.grace_s + 10
    assert warm.left(token) == []


def test_an_interrupt_ends_the_group(warm):
    """CenterMask#58, SimpleTuner#1901: Ctrl-C left workers that held the device."""
    token = warm.token
    # Where the tests themselves run in the background, SIGINT is ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            warm.measure({"kind": "hang", "rank": 0})
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    assert warm.left(token) == []


def test_the_control_channel_is_the_users_own(warm):
    directory = warm.runner._pools.pools[0]._group.directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in directory.iterdir()} >= {"control.sock", "spec.json", "store"}


def test_death_of_the_launcher_ends_the_ranks(warm):
    token = warm.token
    launcher = warm.runner._pools.pools[0]._group.process
    killer = threading.Timer(1.0, launcher.kill)
    killer.start()
    outcome = warm.measure({"kind": "hang", "rank": 0})
    killer.join()
    assert outcome.status is Status.KILLED
    assert outcome.reason == "launcher: it was ended by SIGKILL"
    assert warm.left(token) == []


def test_a_job_that_cannot_be_built_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(SUPPORT)
    other = Bench(tmp_path, factory="faults:broken")
    outcome = other.measure()
    assert outcome.status is Status.OOM
    assert outcome.reason.startswith("rank 1: RuntimeError: CUDA out of memory")
    assert outcome.log_path.endswith("rank1.log")
    other.runner.close()
    assert not (tmp_path / "groups").exists()


def test_two_groups_on_one_host(warm, tmp_path):
    """pytorch/pytorch#126510, TorchDR/TorchDR#249: each has a rendezvous of its own."""
    other = Bench(tmp_path)
    try:
        with ThreadPoolExecutor(2) as both:
            outcomes = list(both.map(lambda bench: bench.measure(), [warm, other]))
        assert [o.status for o in outcomes] == [Status.OK, Status.OK]
    finally:
        other.runner.close()


def test_death_of_the_controller_leaves_nothing(tmp_path):
    """Lightning's and torchrun's orphans: SIGKILL of the controller ends ranks and launcher."""
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_faults_real
        bench = test_faults_real.Bench(Path({str(tmp_path)!r}))
        bench.measure()
        print(bench.token, bench.runner._pools.pools[0]._group.directory, flush=True)
        bench.measure({{"kind": "hang"}}, time_limit_s=60.0)
        """
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", script], cwd=SUPPORT, stdout=subprocess.PIPE, text=True
    )
    token, directory = controller.stdout.readline().split()
    assert len(processes.members(token)) >= 3
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    controller.stdout.close()
    deadline = time.monotonic() + 120
    while processes.members(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes.members(token) == []
    assert not Path(directory).exists()
    assert processes.reap_groups(tmp_path) == 0
    assert not list((tmp_path / "groups").glob("*.json"))
