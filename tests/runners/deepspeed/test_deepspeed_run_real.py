"""DeepSpeed scripts under ``perfsearch-run``, in real processes: no launcher but torch's own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

DATA = Path(__file__).parents[2] / "data"
JOB = str(DATA / "deepspeed_jobs" / "train.py")
STAND_IN = str(DATA / "deepspeed_stand_in")
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install deepspeed)",
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command with two ranks, in a directory that holds the configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def started(file, *words, path=""):
        Path("ds.json").write_text(json.dumps(file))
        command = [sys.executable, "-m", "perfsearch.cli.run", "--nproc-per-node", "2", *words]
        places = [path, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in places if p)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    return started


def test_a_search_over_a_mapped_file_and_its_knobs_in_a_later_start(run):
    keys = {
        "runner.knobs.micro_batch": "[2,4]", "runner.knobs.zero_stage": "1", "budget.trials": "1",
        "confirm.max_repeats": "0", "strategy": "grid", "tracking.enabled": "false",
        "run_dir": "found", "limits.trial_s": "60",
    }  # fmt: skip
    options = [word for key, value in keys.items() for word in ("-o", f"{key}={value}")]
    mapped = ["--map-file", "ds.json:train_micro_batch_size_per_gpu"]
    script = [JOB, "--own-config", "ds.json"]
    told = run(FILE, "--search", *options, *mapped, *script, path=STAND_IN)
    assert "runner=deepspeed, as the script calls for it" in told
    best = yaml.safe_load(Path("found/best/config.yaml").read_text())
    assert (best["runner"]["name"], best["workload"]["map_file"]) == ("deepspeed", [mapped[1]])
    command = Path("found/best/apply/cmd_optimal.txt").read_text()
    assert command.endswith("ds_config_optimal.json\n") and "torch.distributed.run" in command
    best["runner"]["knobs"].update(micro_batch=8, zero_stage=2)
    Path("knobs.yaml").write_text(yaml.safe_dump(best))
    told = run(FILE, "--knobs", "knobs.yaml", *script, "--steps", "5", path=STAND_IN)
    assert "without effect" not in told
    for where in ("zero_optimization.stage=2", "train_micro_batch_size_per_gpu=8",
                  "gradient_accumulation_steps=1"):  # fmt: skip
        assert f"by ds.json:{where}" in told


@needs_deepspeed
def test_the_engine_says_what_is_in_force(run):
    file, script = {**FILE, **ADAM}, [JOB, "--deepspeed_config", "ds.json", "--steps", "5"]
    told = run(file, *script)
    assert "zero_stage=1, micro_batch=4, gradient_accumulation=2" in told
    Path("knobs.yaml").write_text(
        "runner: {name: deepspeed, knobs: {zero_stage: 2, micro_batch: 2}}\n"
    )
    told = run(file, "--knobs", "knobs.yaml", *script)
    assert "zero_stage by ds.json:zero_optimization.stage=2" in told
    assert "without effect" not in told
    Path("other.yaml").write_text("zero_stage: 3\nmicro_batch: 2\n")
    told = run(file, "--knobs", "other.yaml", "--preset", "deepspeed", *script, "--bs", "2")
    assert "zero_stage by ds.json:zero_optimization.stage=3" in told


@needs_deepspeed
def test_the_preset_tunes_around_deepspeed_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    Path("ds.json").write_text(json.dumps({**FILE, **ADAM}))
    options = Script.Options(
        (JOB, "--deepspeed_config", "ds.json"), preset="deepspeed", samples_per_step=16
    )
    environment = Environment(tmp_path, nproc=2, limits=Limits(200, 120, 5))
    wanted = {"micro_batch": "search", "zero_stage": [1, 2], "bucket_cap_mb": "search"}
    runner = Script("cpu", wanted, options, environment)
    try:
        runner.open(tmp_path)
        assert runner.baseline["zero_stage"] == 1 and runner.baseline["micro_batch"] == 4
        assert "no DistributedDataParallel" in runner.left_out["bucket_cap_mb"]
        found = []
        for number, changes in enumerate(({}, {"micro_batch": 2, "zero_stage": 2})):
            plan = Plan(
                number, Purpose.SEARCH if number else Purpose.BASELINE,
                log_directory=tmp_path / "logs" / str(number), scored_seconds=0.1,
                time_limit_s=120.0,
            )  # fmt: skip
            found.append(runner.measure({**runner.baseline, **changes}, plan))
    finally:
        runner.close()
    assert [o.status for o in found] == [Status.OK] * 2, [o.reason for o in found]
    values = [o.measurement.in_force for o in found]
    names = ("zero_stage", "micro_batch", "gradient_accumulation")
    assert [[v[name] for name in names] for v in values] == [[1, 4, 2], [2, 2, 4]]
    assert found[1].measurement.first_losses == pytest.approx(
        found[0].measurement.first_losses, rel=1e-3
    )
