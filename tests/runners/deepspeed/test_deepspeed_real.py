"""``runner=deepspeed`` on two CPU ranks, with a stand-in for DeepSpeed and with itself."""

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from perfsearch.cli.view import open_view
from perfsearch.config.schema import validate
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.instrument.user_files import ROOM
from perfsearch.pipeline.search import run
from perfsearch.runners.base import Plan
from perfsearch.runners.deepspeed.request import Request
from perfsearch.runners.deepspeed.runner import DeepSpeed
from perfsearch.runners.deepspeed.trial import Start
from perfsearch.runners.deepspeed.trial import run as start_and_wait
from perfsearch.workers.processes import members, reap_groups, started_at

DATA = Path(__file__).parents[2] / "data"
JOB = DATA / "deepspeed_jobs" / "train.py"
ONE = f"{sys.executable} {DATA / 'deepspeed_stand_in' / 'bin' / 'deepspeed'} --num_gpus 1 {JOB}"
LAUNCH = ONE.replace("--num_gpus 1", "--num_gpus 2")
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 {JOB}"
FILE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install deepspeed)",
)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DATA / "deepspeed_stand_in"))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings for a configuration and a command's tail, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def build(file, tail="--deepspeed --deepspeed_config ds.json", **changes):
        Path("ds.json").write_text(json.dumps(file))
        plain = {
            "runner": {"name": "deepspeed", **changes.pop("runner", {})},
            "strategy": {"name": "fast"},
            "workload": {"name": "script", "command": f"{changes.pop('launch', LAUNCH)} {tail}"},
            "run_dir": str(tmp_path / "run"),
            "tracking": {"enabled": False},
            "limits": {"startup_s": 120, "trial_s": 60, "grace_s": 5, **changes.pop("limits", {})},
            **changes,
        }
        return DeepSpeed.settle(validate(plain))

    return build


@pytest.fixture
def measure(settings, tmp_path):
    """Measure configurations one after another; the first is the baseline."""

    def run(file, tail="--deepspeed --deepspeed_config ds.json", points=({},), **changes):
        runner = DeepSpeed.from_settings(settings(file, tail, **changes))
        trials, outcomes = [], []
        runner.hints(trials)
        runner.open(tmp_path / "run")
        try:
            for number, point in enumerate(points):
                purpose = point.pop("purpose", Purpose.SEARCH if number else Purpose.BASELINE)
                configuration = runner.space.canonical({**runner.baseline, **point})
                logs = tmp_path / "run" / "logs" / str(number)
                limit_s = 5.0 if "hang" in tail else 60.0
                plan = Plan(number, purpose, log_directory=logs, scored_seconds=0.2,
                            time_limit_s=limit_s)  # fmt: skip
                found = runner.measure(configuration, plan)
                outcomes.append(found)
                trials.append(Trial(number, configuration, purpose, found.status,
                                    found.measurement))  # fmt: skip
        finally:
            runner.close()
        assert not _left(tmp_path), "no process may be left"
        return outcomes

    return run


def _left(directory):
    return [
        p.info["pid"]
        for p in psutil.process_iter(["pid", "cmdline"])
        if str(directory) in " ".join(p.info["cmdline"] or []) and p.info["pid"] != os.getpid()
    ]


@contextlib.contextmanager
def listening():
    """Where processes below this one are seen to listen meanwhile."""
    seen, ended = set(), threading.Event()

    def look():
        while not ended.wait(0.02):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    sockets = child.net_connections("tcp")
                    seen.update(s.laddr.ip for s in sockets if s.status == "LISTEN")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


@pytest.mark.parametrize("launch", [LAUNCH, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_the_store_of_one_node_is_reached_from_it_alone(measure, stand_in, launch):
    """It is rank 0's, or that of torch's launcher."""
    with listening() as seen:
        (found,) = measure(FILE, launch=launch)
    assert found.status is Status.OK, found.reason
    assert "127.0.0.1" in seen
    assert not seen & {"::", "0.0.0.0"}


def test_configurations_are_measured_in_the_unchanged_script(measure, stand_in):
    points = ({}, {"micro_batch": 2, "zero_stage": 2})
    first, second = measure(FILE, points=points)
    assert (first.status, second.status) == (Status.OK, Status.OK), (first.reason, second.reason)
    assert first.measurement.samples_per_step == second.measurement.samples_per_step == 16
    assert len(first.measurement.step_seconds) >= 8
    assert first.measurement.world_size == 2
    assert {"dataloader_next", "forward", "backward", "optimizer"} <= set(
        first.measurement.phases_ms
    )
    assert second.measurement.in_force["gradient_accumulation"] == 4
    assert second.measurement.in_force["zero_stage"] == 2
    assert len(first.measurement.first_losses) == 5
    assert first.measurement.first_losses == pytest.approx(second.measurement.first_losses)
    assert first.measurement.bottleneck_evidence["parameters"] == 16 * 64 + 64 + 64 + 1


@pytest.mark.parametrize("around", [False, True])
def test_a_script_without_a_launcher_is_started_as_torchrun_does(
    measure, stand_in, tmp_path, monkeypatch, around
):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    if around:  # as Accelerate's launcher, which calls torch's with no directory for its logs
        monkeypatch.setenv("PET_LOG_DIR", "")
    points = ({"micro_batch": 2, "zero_stage": 2},)
    (found,) = measure(FILE, "--deepspeed_config ds.json", points, launch=str(JOB), nproc=2)
    assert found.status is Status.OK, found.reason
    assert found.measurement.samples_per_step == 16
    assert found.measurement.in_force["gradient_accumulation"] == 4
    assert list(temporary.glob("torchelastic_*")) == []


def test_the_window_is_the_one_of_the_section(measure, stand_in):
    section = {"start_profile_step": 4, "end_profile_step": 7}
    tail = "--steps 7 --deepspeed_config ds.json"
    (found,) = measure({**FILE, "autotuning": section}, tail, launch=ONE)
    assert found.status is Status.OK, found.reason
    assert found.measurement.discarded_steps == 3
    assert len(found.measurement.step_seconds) == 4


def test_a_script_that_goes_on_with_its_own_batch_is_found_out(measure, stand_in):
    points = ({}, {"micro_batch": 2})
    _, found = measure(FILE, "--bs 4 --deepspeed_config ds.json", points)
    assert found.status is Status.NOT_APPLIED
    assert "arg_mappings" in found.reason


def test_a_configuration_that_the_script_names_is_replaced(measure, stand_in):
    points = ({"zero_stage": 3},)
    (found,) = measure(FILE, "--own-config ds.json", points, runner={"ds_config": "ds.json"})
    assert found.status is Status.OK, found.reason
    assert found.measurement.in_force["zero_stage"] == 3


def test_files_that_the_script_changes_are_put_back(measure, stand_in, tmp_path):
    (tmp_path / "mine.pt").write_text("weights")
    points = ({}, {"micro_batch": 2})
    found = measure(FILE, "--fail files --deepspeed_config ds.json", points)
    assert [one.status for one in found] == [Status.OK, Status.OK], [one.reason for one in found]
    assert (tmp_path / "mine.pt").read_text() == "weights"
    assert not (tmp_path / "made.pt").exists() and not (tmp_path / ROOM).exists()


@pytest.mark.parametrize(
    ("launch", "tail", "status", "words"),
    [
        (LAUNCH, "--fail oom", Status.OOM, "CUDA out of memory"),
        (LAUNCH, "--fail crash", Status.CRASH, "rank 1: KeyError: 'labels'"),
        (ONE, "--fail hang", Status.TIMEOUT, "took longer than 25 s; rank"),
        (LAUNCH, "--fail part", Status.INVALID, "ended after 2 steps"),
        (ONE, "--fail 'no engine'", Status.INVALID, "without calling deepspeed.initialize"),
        (ONE, "--steps 3", Status.INVALID, "ended after 3 steps"),
        (
            ONE,
            "--odd 1",
            Status.CRASH,
            "refused its arguments: train.py: error: unrecognized arguments: --odd 1",
        ),
    ],
)
def test_failures_have_their_kind_and_cause(measure, stand_in, launch, tail, status, words):
    file, limits = f"{tail} --deepspeed_config ds.json", {"startup_s": 20}
    (found,) = measure(FILE, file, launch=launch, limits=limits)
    assert found.status is status, found.reason
    assert words in found.reason
    assert Path(found.log_path).exists()


@pytest.mark.parametrize(
    ("launch", "status", "words"),
    [
        ("nowhere/deepspeed train.py", Status.INVALID, "nowhere/deepspeed: No such file"),
        (f"{sys.executable} -c 'import time; time.sleep(600)'", Status.TIMEOUT, "was ever seen"),
    ],
)
def test_a_command_that_starts_no_rank_leaves_nothing(tmp_path, launch, status, words):
    request = Request(str(tmp_path / "logs"), (os.getpid(), started_at(os.getpid())))
    limits = Limits(startup_s=1, grace_s=5)
    found = start_and_wait(Start(shlex.split(launch), request, 2, tmp_path, limits), 2.0)
    assert found.status is status
    assert words in found.reason
    assert Path(found.log_path).name == "launcher.log"
    assert not (tmp_path / "groups").exists()


def test_death_of_the_controller_ends_ranks_and_launcher(tmp_path, stand_in):
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    words = shlex.split(f"{LAUNCH} --fail hang --deepspeed_config ds.json")
    script = textwrap.dedent(
        f"""
        import os
        from pathlib import Path
        from perfsearch.runners.deepspeed.request import Request
        from perfsearch.runners.deepspeed.trial import Start, run
        from perfsearch.core.hardware import Limits
        from perfsearch.workers.processes import started_at
        request = Request("logs", (os.getpid(), started_at(os.getpid())))
        run(Start({words!r}, request, 2, Path(), Limits(startup_s=300)), 60.0)
        """
    )
    controller = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    try:
        while len(list((tmp_path / "logs").glob("rank*.log"))) < 2:
            assert controller.poll() is None
            time.sleep(0.1)
        (record,) = (tmp_path / "groups").glob("*.json")
        group = json.loads(record.read_text())
        assert len(members(group["token"])) >= 3
    finally:
        controller.kill()
        controller.wait()
    while members(group["token"]):
        time.sleep(0.1)
    assert reap_groups(tmp_path) == 0
    assert not Path(group["control_directory"]).exists()
    assert not list((tmp_path / "groups").glob("*.json"))


def test_what_deepspeed_refuses_is_invalid(measure, stand_in):
    (found,) = measure({**FILE, "refuse": "stage 9 is not possible"}, launch=ONE)
    assert found.status is Status.INVALID
    assert "stage 9 is not possible" in found.reason


def test_a_setting_that_did_not_take_effect_is_not_applied(measure, stand_in):
    file = {**FILE, "zero_optimization": {"stage": 2, "ignored": True}}
    (found,) = measure(file, launch=ONE)
    assert found.status is Status.NOT_APPLIED
    assert "zero_stage=2 was asked for, 1 is in effect" in found.reason


def test_run_trains_with_the_tuned_file_after_the_search(settings, stand_in, tmp_path):
    section = {"results_dir": "found", "overwrite": False, "end_profile_step": 12}
    Path("found").mkdir()
    Path("found/ds_config_optimal.json").write_text("older")
    code = run(
        settings(
            {**FILE, "autotuning": section},
            "--steps 40 --deepspeed_config ds.json",
            runner={
                "autotuning": "run",
                "knobs": {"zero_stage": [0, 2], "micro_batch": 4, "gradient_accumulation": 2},
            },
            confirm={"max_repeats": 0},
            budget={"trials": 1},
        ),
        open_view,
    )
    assert code == 0
    assert (tmp_path / "found" / "ds_config_optimal.json.1").read_text() == "older"
    tuned = json.loads((tmp_path / "found" / "ds_config_optimal.json").read_text())
    assert {k: v for k, v in tuned.items() if k != "zero_optimization"} == FILE
    command = (tmp_path / "found" / "cmd_optimal.txt").read_text()
    assert command.endswith(
        f"--steps 40 --deepspeed_config {tmp_path}/found/ds_config_optimal.json\n"
    )
    assert "num_experiments" in (tmp_path / "found" / "summary.txt").read_text()
    assert sorted(p.name[:2] for p in (tmp_path / "autotuning_exps").iterdir())[:1] == ["z0"]


@needs_deepspeed
def test_the_four_stages_of_deepspeed_compute_the_same(measure):
    file = {**FILE, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
    points = (
        {},
        {"zero_stage": 1, "micro_batch": 8},
        {"zero_stage": 2, "micro_batch": 2},
        {"zero_stage": 3, "purpose": Purpose.CONFIRM},
    )
    found = measure(file, points=points, launch=TORCHRUN)
    assert [o.status for o in found] == [Status.OK] * 4, [o.reason for o in found]
    for outcome in found:
        assert outcome.measurement.first_losses == pytest.approx(
            found[0].measurement.first_losses, rel=1e-4
        )
        assert outcome.measurement.samples_per_step == 16
    assert [o.measurement.in_force["zero_stage"] for o in found] == [0, 1, 2, 3]
    assert not (Path("run") / "logs" / "3" / "checkpoint").exists()
