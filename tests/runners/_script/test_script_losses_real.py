"""Searches of scripts whose starts differ, or end early, through the command."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from perfsearch.core.journal import read
from perfsearch.core.losses import largest_difference
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.loss_check import is_perturbed

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
NOTHING_ELSE = {
    "runner.knobs.dataloader_workers": "null",
    "runner.knobs.persistent_workers": "null",
    "runner.knobs.prefetch_factor": "null",
    "runner.knobs.optimizer_implementation": "null",
    "runner.knobs.omp_num_threads": "null",
}
UNSEEDED = """\
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=1.0)
parser.add_argument("--by-the-clock", action="store_true")
args = parser.parse_args()
if args.by_the_clock:
    torch.seed()
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
net = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(4):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        (args.scale * torch.nn.functional.cross_entropy(net(x), y)).backward()
        optimizer.step()
"""


class Searched:
    """A search that has ended."""

    def __init__(self, directory, script, *words, nproc=1, options=(), more=(), exit_code=0):
        settings = {
            **NOTHING_ELSE,
            "tracking.enabled": "false",
            "run_dir": "out",
            "strategy": "grid",
            "objective.min_gain": "0",
            "confirm.max_repeats": "0",
            **dict(options),
        }
        given = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        # a lock of its own: other searches of these tests may run on the same processors
        with tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp") as temporary:
            done = subprocess.run(
                [sys.executable, "-m", "perfsearch.cli.run", "--search",
                 f"--nproc-per-node={nproc}", *given, *more, script, *words],
                cwd=directory, capture_output=True, text=True, timeout=600, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": temporary},
            )  # fmt: skip
        self.said = done.stdout + done.stderr
        assert done.returncode == exit_code, self.said[-3000:]
        _, events = read(directory / "out" / "journal.jsonl")
        ended = [Trial.from_json(e.data["trial"]) for e in events if e.name == "finished"]
        self.trials = list({t.number: t for t in ended}.values())
        summary = directory / "out" / "best" / "summary.json"
        self.summary = json.loads(summary.read_text()) if summary.exists() else {}

    def of(self, purpose):
        return [t for t in self.trials if t.purpose is purpose]


def copied(directory, name):
    shutil.copy(SCRIPTS / name, directory)
    return name


@pytest.mark.parametrize("by_the_clock", [False, True])
def test_a_script_without_a_seed_is_searched_and_another_loss_still_found(tmp_path, by_the_clock):
    (tmp_path / "train.py").write_text(UNSEEDED)
    found = Searched(
        tmp_path,
        "train.py",
        *("--scale", "1.0"),
        *(["--by-the-clock"] if by_the_clock else []),
        more=["--map", "scale=--scale"],
        options={"runner.knobs.scale": "[1.0,2.0]", "runner.knobs.omp_num_threads": "[1,2]"},
    )
    same = [t for t in found.trials if t.configuration["scale"] == 1.0]
    other = [t for t in found.trials if t.configuration["scale"] == 2.0]
    assert len(same) >= 3 and {t.status for t in same} == {Status.OK}, found.said
    assert len(other) == 2 and {t.status for t in other} == {Status.DIVERGED}, found.said
    losses = [t.measurement.first_losses for t in same if t.configuration["omp_num_threads"] == 1]
    assert len(losses) == 2
    assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) is not by_the_clock
    assert ("the baseline's own losses differ by up to" in found.said) is by_the_clock


OTHER_KERNELS = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

def block():
    return [torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]

net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), *[layer for _ in range(8) for layer in block()],
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
data = TensorDataset(torch.randn(8192, 3, 12, 12), torch.randint(0, 10, (8192,)))
for x, y in DataLoader(data, batch_size=8):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = net(x)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(outputs.float(), y).backward()
    optimizer.step()
"""


def test_other_kernels_are_held_to_what_rounding_makes_of_the_losses(tmp_path):
    """Convolutions in bfloat16 with channels last: some percent after five steps."""
    (tmp_path / "train.py").write_text(OTHER_KERNELS)
    found = Searched(tmp_path, "train.py", options={"runner.knobs.channels_last": "search"})
    (last,) = found.of(Purpose.SEARCH)
    assert last.configuration["channels_last"] and last.status is Status.OK, found.said
    perturbed = [t for t in found.trials if is_perturbed(t)]
    first, *_ = found.trials
    apart = largest_difference(first.measurement.first_losses, last.measurement.first_losses)
    assert bool(perturbed) == (apart > 1e-3), found.said


def test_a_dropout_lets_the_micro_batch_change_its_masks(tmp_path):
    found = Searched(
        tmp_path,
        copied(tmp_path, "dropout_micro_batch.py"),
        *("--batch", "8", "--accumulate", "2"),
        more=["--map", "micro_batch=--batch", "--map", "gradient_accumulation=--accumulate"],
        options={"budget.trials": "3", "runner.knobs.micro_batch": "[4,8,16]"},
    )
    assert {t.status for t in found.trials} == {Status.OK}, found.said
    assert {t.configuration["micro_batch"] for t in found.trials} == {4, 8, 16}
    assert "draws random numbers (dropout, say), and others with another micro_batch" in found.said


def test_a_baseline_that_ends_early_when_it_is_confirmed_is_a_result(
    tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("STARTS", str(tmp_path_factory.mktemp("elsewhere") / "starts.txt"))
    found = Searched(
        tmp_path,
        copied(tmp_path, "confirm_baseline_ends_early.py"),
        options={"runner.knobs.dataloader_workers": "[0,2]", "confirm.max_repeats": "2"},
    )
    assert "the baseline failed in a fresh start (invalid: the script made 5 steps" in found.said
    assert "no speed-up can be stated" in found.summary["verdict"]
    assert found.summary["is_baseline"] and found.summary["speed_up"] is None
    assert found.summary["knobs"]["dataloader_workers"] == 0


def test_a_script_that_fails_at_its_end_fails_no_configuration(tmp_path):
    found = Searched(
        tmp_path,
        copied(tmp_path, "fails_after_training.py"),
        *("--checkpoints", "no"),
        nproc=2,
        options={
            "runner": "ddp",
            **{f"runner.knobs.{n}": "null" for n in ("static_graph", "first_bucket_mb")},
            "runner.knobs.bucket_cap_mb": "[1.0,25.0]",
            "confirm.max_repeats": "0",
        },
    )
    tried = found.of(Purpose.SEARCH)
    assert len(tried) >= 2 and {t.status for t in tried} == {Status.OK}, found.said


def test_a_script_that_does_not_run_ends_its_search_at_once(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys\nprint('the licence server said no', flush=True)\nsys.exit(3)\n"
    )
    found = Searched(tmp_path, "train.py", exit_code=1)
    assert [(t.number, t.status) for t in found.trials] == [(0, Status.CRASH)]
    assert 'exit code 3; its last line: "the licence server said no"' in found.said
    assert "See whether it runs alone: torchrun" in found.said
