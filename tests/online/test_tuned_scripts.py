"""Scripts of frameworks, unchanged: tuned by perfsearch-run they train what they train untuned."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.online import log

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent.parent.parent / "examples" / "scripts"

SAYING = """
import runpy, sys
import {module} as framework
run = framework.Trainer.{method}
def and_say(trainer, *arguments, **named):
    result = run(trainer, *arguments, **named)
    model = arguments[0] if arguments else trainer.model
    norms = [str(float(p.detach().double().norm())) for p in model.parameters()]
    sys.stdout.write(" ".join(["WEIGHTS", *norms]) + "\\n")  # at once, as ranks share the stream
    return result
framework.Trainer.{method} = and_say
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

CASES = {
    "transformers": ("hf_trainer.py", "train", (
        "--output_dir", "out", "--max_steps", "{steps}", "--use_cpu", "True", "--ddp_backend",
        "gloo", "--save_strategy", "no", "--report_to", "none",
    )),
    "lightning": ("lightning_train.py", "fit", ("--steps", "{steps}", "--accumulate", "2")),
}  # fmt: skip


def run(module, directory, steps, *options):
    """Norms of all parameters at the end, and what was said."""
    script, method, arguments = CASES[module]
    wrapped = directory / "script.py"
    wrapped.write_text(SAYING.format(module=module, method=method))
    command = [
        *(sys.executable, "-m", "perfsearch.cli.run", "--standalone", "--nproc-per-node=2"),
        *(*options, str(wrapped), str(SCRIPTS / script)),
        *(a.format(steps=steps) for a in arguments),
    ]
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    line = re.search(r"WEIGHTS (.*)", done.stdout + done.stderr)
    return [float(v) for v in line.group(1).split()], done.stderr


@pytest.mark.parametrize("module", CASES)
def test_a_frameworks_script_tuned_and_untuned(module, tmp_path):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    steps = 60
    plain, _ = run(module, tmp_path, steps)
    tuned, said = run(
        module, tmp_path, steps, "--autotune-log-file", "log.csv", "--autotune-max-samples", "2",
        "--autotune-steps-per-sample", "2", "--autotune-warmup-samples", "0",
    )  # fmt: skip
    assert tuned == pytest.approx(plain, rel=1e-4)
    record = log.read(tmp_path / "log.csv")
    assert record.trials[0].purpose == "baseline"
    assert "perfsearch autotune:" in said
