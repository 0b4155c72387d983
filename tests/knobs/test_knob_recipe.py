"""The recipe for a knob in CONTRIBUTING.md, followed in a copy of the package."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perfsearch.online import log

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEADING = "## A new knob is one record and one line of YAML"

SCRIPT = """
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(32, 32) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def is_over(step):
    log = os.environ.get("UNTIL_FINAL")  # the row of that name ends the tuning
    tuned = log is None or (Path(log).exists() and ",final," in Path(log).read_text())
    over = torch.tensor([step >= 60 and tuned])
    dist.broadcast(over, 0)
    return bool(over)


step = 0
while not is_over(step):
    step += 1
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"batched_grad_copy is {model.batched_grad_copy}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A directory with the package, the record and the line added."""
    directory = tmp_path_factory.mktemp("recipe")
    shutil.copytree(ROOT / "perfsearch", directory / "perfsearch")
    shutil.copytree(ROOT / "conf", directory / "perfsearch" / "conf")
    text = (ROOT / "CONTRIBUTING.md").read_text().partition(HEADING)[2]
    record, line = (re.search(rf"```{k}\n(.*?)```", text, re.DOTALL)[1] for k in ("python", "yaml"))
    module = directory / "perfsearch" / "knobs" / "ddp.py"
    source = module.read_text()
    (records,) = (
        node for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and node.target.id == "RECORDS"
    )  # fmt: skip
    lines = source.splitlines(keepends=True)
    lines.insert(records.end_lineno - 1, f"{record.rstrip()},\n")
    module.write_text("".join(lines))
    option = directory / "perfsearch" / "conf" / "runner" / "ddp.yaml"
    option.write_text(f"{option.read_text()}{line}")
    assert yaml.safe_load(option.read_text())["knobs"]["batched_grad_copy"] == "search"
    (directory / "train.py").write_text(SCRIPT)
    return directory


def run(directory, module, *words, **variables):
    environment = {**os.environ, **variables, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=directory, capture_output=True, text=True,
        env={**environment, "MLFLOW_DISABLE_TELEMETRY": "true"}, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def in_a_script(directory, *options, **variables):
    torchrun = ("--standalone", "--nproc-per-node=2")
    return run(directory, "perfsearch.cli.run", *torchrun, *options, "train.py", **variables)


def test_a_built_in_job_searches_it(copied):
    run(
        copied, "perfsearch.cli.search", "runner=ddp", "runner.device=cpu", "workload=mlp",
        "nproc=2",
        "~runner.knobs", "+runner.knobs={batched_grad_copy: search}", "strategy=grid",
        "budget.trials=1", "confirm.finalists=0", "objective.min_gain=0", "run_dir=run",
        "tracking.enabled=false",
    )  # fmt: skip
    events = [json.loads(text) for text in (copied / "run" / "journal.jsonl").open()]
    trials = [e["trial"] for e in events if e.get("event") == "finished"]
    asked = [t["configuration"] for t in trials]
    assert {"batched_grad_copy": True} in asked
    for trial in trials:
        wanted = trial["configuration"]["batched_grad_copy"]
        assert trial["measurement"]["in_force"]["batched_grad_copy"] is wanted


def test_an_unchanged_script_is_given_it(copied):
    (copied / "knobs.yaml").write_text("batched_grad_copy: true\n")
    said = in_a_script(copied, "--knobs", "knobs.yaml")
    assert "in force: batched_grad_copy=true (DistributedDataParallel)" in said
    assert "batched_grad_copy is True" in said


def test_a_job_that_goes_on_tunes_it(copied):
    in_a_script(
        copied, "--autotune", "--autotune-log-file", "log.csv", "--autotune-max-samples", "2",
        "--autotune-steps-per-sample", "2", "--autotune-knobs", "bucket_cap_mb=25",
        "--autotune-knobs", "first_bucket_mb=1", "--autotune-knobs",
        "optimizer_implementation=default", "--autotune-knobs", "gradient_as_bucket_view=false",
        UNTIL_FINAL="log.csv",
    )  # fmt: skip
    tried = [
        trial.configuration["batched_grad_copy"] for trial in log.read(copied / "log.csv").trials
    ]
    assert {False, True} <= set(tried)
