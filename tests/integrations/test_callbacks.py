"""Callbacks in real runs of the frameworks: two ranks each, on the CPU."""

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.errors import BadInputError
from perfsearch.integrations.training_run import Applying, Tuning

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"

WITH_CALLBACK = """
import runpy, sys
import {module} as framework
from perfsearch.integrations.{module} import ApplyCallback, AutotuneCallback
make = framework.Trainer.__init__
def with_callback(self, *arguments, **named):
    make(self, *arguments, callbacks=[{callback}], **named)
framework.Trainer.__init__ = with_callback
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import torch
later = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
sys.stderr.write("LATER " + type(later).__name__ + "\\n")
torch.distributed.destroy_process_group()
"""

CASES = {
    "transformers": ("hf_trainer.py", (
        "--output_dir", "out", "--max_steps", "60", "--use_cpu", "True", "--ddp_backend", "gloo",
        "--save_strategy", "no", "--report_to", "none",
    )),
    "lightning": ("lightning_train.py", ("--steps", "60")),
}  # fmt: skip


def run(module, directory, callback):
    """What a framework's example says on standard error with a callback in its Trainer."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}")
    script, arguments = CASES[module]
    wrapped = directory / "script.py"
    wrapped.write_text(WITH_CALLBACK.format(module=module, callback=callback))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(wrapped), str(SCRIPTS / script), *arguments),
    ]
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", CASES)
def test_a_run_is_tuned_by_its_callback(module, tmp_path):
    options = "log_file='log.csv', max_samples=2, steps_per_sample=2, warmup_samples=0"
    said = run(module, tmp_path, f"AutotuneCallback({options})")
    with (tmp_path / "log.csv").open() as file:
        *_, final = csv.DictReader(file)
    assert final["purpose"] == "final"
    assert 2 < int(final["train_iter"]) <= 60  # the Trainer's own steps; how far it came is chance
    assert final["job"].startswith("2 x cpu, ")
    assert "perfsearch autotune: " in said
    assert said.count("LATER DistributedDataParallel") == 2  # made after training, and left alone


@pytest.mark.slow
@pytest.mark.parametrize("module", CASES)
def test_a_found_configuration_is_applied_by_its_callback(module, tmp_path):
    knobs = {"bucket_cap_mb": 8, "optimizer_implementation": "foreach", "dataloader_workers": 0}
    said = run(module, tmp_path, f"ApplyCallback({knobs!r})")
    (told,) = re.findall("perfsearch: (.*)", said)  # on one rank
    assert told.startswith("in force: ")
    assert "bucket_cap_mb=8" in told
    assert "optimizer_implementation=foreach" in told


WITHOUT_FRAMEWORK = """
import torch, torch.distributed as dist
from perfsearch.integrations.training_run import Applying, Tuning
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
make = torch.nn.parallel.DistributedDataParallel
knobs = {"bucket_cap_mb": 8, "optimizer_implementation": "foreach", "prefetch_factor": 4}
applying = Applying(knobs)
applying.before_building()
model = make(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    applying.report(step)
applying.report()
tuning = Tuning({"max_samples": 2})
for when in (tuning.before_wrapping, tuning.after_wrapping, tuning.before_wrapping):
    when()
    make(torch.nn.Linear(2, 2))
"""


def test_what_callbacks_do_at_a_frameworks_moments():
    """One process by itself, which is said where tuning would begin; nothing else needs more."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FRAMEWORK],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall("perfsearch: (.*)", done.stderr) == [
        "in force: bucket_cap_mb=8 (DistributedDataParallel), "
        "optimizer_implementation=foreach (AdamW)",
        "without effect: prefetch_factor=4: the script makes nothing that takes it",
    ]
    assert done.stderr.count("perfsearch autotune: one process alone has nothing to tune") == 2


def test_what_cannot_be_is_refused_before_the_run():
    with pytest.raises(BadInputError, match=r"autotune.max_samples=-1"):
        Tuning({"max_samples": -1})
    with pytest.raises(BadInputError, match="bucket_cap"):
        Applying({"bucket_cap": 1})
    with pytest.raises(BadInputError, match="no such file"):
        Applying("nowhere")


def test_importing_the_package_imports_no_framework():
    code = "import sys, perfsearch.integrations.training_run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"transformers", "lightning", "torch"} & set(done.stdout.split())
