"""What a new start of a script costs beside its scored steps, with its imports once and anew.

    python benchmarks/script_starts.py                        # the HF Trainer, or what is installed
    python benchmarks/script_starts.py -- train.py --epochs 9
    python benchmarks/script_starts.py --device cuda -- train.py

Both ways are begun at first and measured in turn, each time by a new start with the baseline's
configuration: wall time less scored and discarded steps. The first such start of ``once`` makes the
process that the others are forked from, and stands apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

from perfsearch.core.hardware import Environment
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

ROOT = Path(__file__).parents[1]

TRAINER = (
    *(str(ROOT / "examples" / "scripts" / "hf_trainer.py"), "--max_steps", "1000000"),
    *("--save_strategy", "no", "--report_to", "none", "--output_dir"),
)

STAND_IN = """\
import pandas, pyarrow, scipy.optimize, scipy.stats, sklearn.ensemble, torch
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    net(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
"""


def default_command(directory: Path, device: str) -> list[str]:
    """The Trainer's example, or a script with packages that are there."""
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        return [*TRAINER, str(directory / "out"), "--use_cpu", str(device == "cpu")]
    script = directory / "stand_in.py"
    script.write_text(STAND_IN)
    return [str(script)]


def opened(directory: Path, command: list[str], device: str, once: bool) -> Script:
    """A runner whose script has been started for the first time."""
    directory.mkdir()
    options = Script.Options(tuple(command), import_once=once)
    where = Environment(directory, directory=directory)
    runner = Script(device, {"pin_memory": "search"}, options, where)
    runner.open(directory)
    if runner.start_failure:
        sys.exit(f"{command[0]}: {runner.start_failure}")
    runner.rest()
    return runner


def cost_s(runner: Script, directory: Path, number: int) -> float:
    """Seconds of one measurement in a new start, less those of the steps."""
    plan = Plan(
        number, Purpose.CONFIRM, fresh=True, log_directory=directory / "logs" / f"{number:04d}"
    )
    begin = time.monotonic()
    outcome = runner.measure(runner.baseline, plan)
    seconds = time.monotonic() - begin
    if outcome.status is not Status.OK or outcome.measurement is None:
        sys.exit(f"a start failed: {outcome.status}, {outcome.reason}")
    measured = outcome.measurement
    return seconds - sum(measured.step_seconds) - measured.discarded_seconds


def main() -> int:
    """Measure both ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = asked.command or default_command(directory, asked.device)
        runners = {
            label: opened(directory / label, command, asked.device, label == "once")
            for label in ("anew", "once")
        }
        costs: dict[str, list[float]] = {label: [] for label in runners}
        try:
            for number in range(1, asked.starts + 2):
                for label, runner in runners.items():
                    costs[label].append(cost_s(runner, directory / label, number))
            remarks = runners["once"].closing_lines(runners["once"].baseline, [])
        finally:
            for runner in runners.values():
                runner.close()
    print("| imports | starts | first s | later s, median | smallest | largest |")
    print("|---|---|---|---|---|---|")
    for label, (first, *later) in costs.items():
        middle = statistics.median(later)
        print(
            f"| {label} | {len(later)} | {first:.2f} | {middle:.2f} | {min(later):.2f} | "
            f"{max(later):.2f} |"
        )
    ratio = statistics.median(costs["once"][1:]) / statistics.median(costs["anew"][1:])
    print(f"\nonce / anew: {ratio:.2f} (wanted: at most 0.5)")
    for line in remarks:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
