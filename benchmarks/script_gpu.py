"""Unchanged scripts on real GPUs: what a search finds over an expert's settings.

    python benchmarks/script_gpu.py CASE... [--out results.jsonl] [--nproc 4]
    python benchmarks/script_gpu.py report --out results.jsonl

Cases, each with a baseline that is tuned by hand as an expert would do it from the manuals:

- ``trainer-fsdp``: the HF Trainer with FSDP on a Llama of 1.07 billion parameters, bf16. The
  expert: every layer a unit of FSDP, the largest power of two as micro-batch that fits without
  checkpointing (16 on 80 GB), the Trainer's fused AdamW, two loader processes.
- ``ddp-tcp``: a plain DDP script (``_expert_ddp.py``) over NCCL's TCP sockets on one host (P2P and
  shared memory off), 0.1 billion parameters. The expert: bf16 autocast, fused AdamW, gradients as
  views of buckets, pinned loader processes; buckets and sockets as they are shipped.
- ``nothing``: the same script over NVLink, a batch so large that computing is all there is.
- ``oom``: ``trainer-fsdp`` with a micro-batch of 64, which does not fit.

After the search ``best/apply/run.sh`` and the same command with the baseline's settings are run
with perfsearch blocked from import, and the throughput that the script itself prints is read.
Needs torch, transformers and accelerate, numpy, psutil, pynvml, scikit-learn and PyYAML.
``--small`` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from _handed_over import ENDLESS, shortened, without_perfsearch  # noqa: E402

from perfsearch.cli.view import open_view  # noqa: E402
from perfsearch.config.schema import validate  # noqa: E402
from perfsearch.core.trial import Trial  # noqa: E402
from perfsearch.core.verdict import Interval  # noqa: E402
from perfsearch.pipeline import search  # noqa: E402

SCRIPTS = ROOT / "examples" / "scripts"
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
LLAMA = ["--hidden_size", "2048", "--layers", "14", "--heads", "16", "--vocabulary", "32000",
         "--sequence_length", "1024"]  # fmt: skip
TRAINER = [
    str(SCRIPTS / "hf_trainer.py"), "--output_dir", "out", "--max_steps", "{steps}",
    "--bf16", "True", "--save_strategy", "no",
    "--fsdp", "full_shard auto_wrap", "--dataloader_num_workers", "2", "--logging_steps", "1000",
    *LLAMA,
]  # fmt: skip
PLAIN = [str(ROOT / "benchmarks" / "_expert_ddp.py"), "--steps", "{steps}"]
SMALL = {
    "trainer": ["--use_cpu", "True", "--ddp_backend", "gloo", "--bf16", "False", "--fsdp", "",
                "--hidden_size", "64", "--layers", "2", "--heads", "4", "--vocabulary", "512",
                "--sequence_length", "64"],
    "plain": ["--width", "64", "--layers", "2", "--length", "32", "--vocabulary", "512",
              "--batch-size", "8"],
}  # fmt: skip
"""What comes last among the arguments counts, with ``--small``."""
BATCH = {"trainer": "--per_device_train_batch_size", "plain": "--batch-size"}

CASES: dict[str, dict[str, Any]] = {
    "trainer-fsdp": {
        "runner": "zero",
        "command": [*TRAINER, "--per_device_train_batch_size", "16"],
        "preset": "hf-trainer",
        "rerun_steps": 60,  # the Trainer's rate has its slow first steps in it
    },
    "ddp-tcp": {
        "runner": "ddp",
        "command": [*PLAIN, "--batch-size", "16"],
        "environ": TCP,
        "rerun_steps": 60,
    },
    "nothing": {
        "runner": "ddp",
        "command": [*PLAIN, "--batch-size", "64"],
        "rerun_steps": 60,
    },
    "oom": {
        "runner": "zero",
        "command": [*TRAINER, "--per_device_train_batch_size", "64"],
        "preset": "hf-trainer",
        "rerun_steps": 30,
    },
}  # fmt: skip


def command_of(case: dict[str, Any], small: bool, micro_batch: int | None) -> list[str]:
    """The script and its arguments, with ``{steps}`` where the number of steps stands."""
    command = list(case["command"])
    if micro_batch is not None:
        command += [BATCH["trainer" if "preset" in case else "plain"], str(micro_batch)]
    return command + (SMALL["trainer" if "preset" in case else "plain"] if small else [])


def run_case(name: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Search one case, run what it hands over, and return the figures."""
    case, nproc = CASES[name], options.nproc
    os.environ.update(case.get("environ", {}))
    run_dir = directory / name
    command = command_of(case, options.small, options.micro_batch)
    workload: dict[str, Any] = {
        "name": "script",
        "command": [word.format(steps=ENDLESS) for word in command],
    }
    if "preset" in case:
        workload["preset"] = case["preset"]
    settings = validate(
        {
            "runner": {"name": "ddp" if options.small else case["runner"]},
            "strategy": {"name": "bayes"},
            "workload": workload,
            "nproc": nproc,
            "run_dir": str(run_dir),
            "budget": {"trials": options.trials, "seconds": options.seconds},
            "confirm": {"finalists": 1, "max_repeats": 4, "seconds": options.confirm_seconds},
            "tracking": {"enabled": False},
        }
    )
    begin = time.time()
    result = search.run_search(settings, open_view)
    spent_s = time.time() - begin
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    found: dict[str, Any] = {
        "case": name,
        "verdict": summary["verdict"],
        "speed_up": summary.get("speed_up"),
        "repeats": summary.get("repeats"),
        "unit": summary.get("unit"),
        "spent_s": spent_s,
        "device_minutes": spent_s * nproc / 60,
        "differs": _differences(run_dir),
        "gpu": summary["provenance"]["identity"]["gpu"],
        "trials": [_of_trial(t) for t in result.trials],
        "winner": summary["trial"],
    }
    plain = [word.format(steps=case["rerun_steps"]) for word in command]
    alone = without_perfsearch(run_dir / "blocked", os.environ)
    rates: dict[str, list[float]] = {"baseline": [], "handed over": []}
    for _ in range(options.reruns):  # in turn, so that a drift meets both
        short = ["sh", str(shortened(run_dir, case["rerun_steps"]))]
        rates["handed over"].append(_rate(short, run_dir, alone))
        rates["baseline"].append(_rate([*_torchrun(nproc), *plain], run_dir, alone))
    found["without_perfsearch"] = {who: statistics.mean(r) for who, r in rates.items()}
    return found


def _of_trial(trial: Trial) -> dict[str, Any]:
    measured = trial.measurement
    return {
        "number": trial.number, "purpose": str(trial.purpose), "status": str(trial.status),
        "reason": trial.reason, "objective": trial.objective, "knobs": trial.configuration,
        "seconds": trial.seconds,
        "first_losses": measured.first_losses if measured else None,
        "samples_per_step": measured.samples_per_step if measured else None,
    }  # fmt: skip


def _differences(run_dir: Path) -> str:
    import yaml

    return str(yaml.safe_load((run_dir / "best" / "config.yaml").read_text())["runner"]["knobs"])


def _torchrun(nproc: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={nproc}"]  # fmt: skip


def _rate(command: list[str], run_dir: Path, environment: dict[str, str]) -> float:
    """Samples a second that the script prints; 0.0 where it fails."""
    done = subprocess.run(
        command, env=environment, cwd=run_dir, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    rates = re.findall(r"(\d+) samples/s|train_samples_per_second'?: '?([\d.]+)", done.stdout)
    if not rates:
        print(done.stderr[-1500:], flush=True)
        return 0.0
    numbers = [float(one or other) for one, other in rates]
    return statistics.median(numbers[1:] or numbers)


def report(file: Path) -> None:
    """Print the table."""
    head = [
        "case",
        "gain (95% interval)",
        "before",
        "after",
        "losses apart, at most",
        "GPU minutes",
        "break-even, steps",
        "without perfsearch: before, after",
        "found",
    ]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))  # fmt: skip
    for line in file.read_text().splitlines():
        print("| " + " | ".join(_row(json.loads(line))) + " |")


def _row(found: dict[str, Any]) -> list[str]:
    interval, repeats = found["speed_up"], found["repeats"] or {}
    shown = Interval(**interval).gain if interval else found["verdict"]
    best = next((r for who, r in repeats.items() if who != "baseline"), [])
    sides = [repeats.get("baseline", []), best]
    rates = [f"{statistics.median(s):.1f} {found['unit']}" if s else "-" for s in sides]
    alone = found["without_perfsearch"]
    again = f"{alone['baseline']:.1f}, {alone['handed over']:.1f} samples/s"
    return [found["case"], shown, *rates, _losses(found), f"{found['device_minutes']:.1f}",
            _break_even(found), again, found["differs"]]  # fmt: skip


def _losses(found: dict[str, Any]) -> str:
    """Largest relative difference of the finalist's first losses from the baseline's."""
    by_number = {t["number"]: t["first_losses"] for t in found["trials"]}
    finalists = [int(who) for who in found["repeats"] or {} if who != "baseline"]
    first, last = by_number.get(0), by_number.get(finalists[0]) if finalists else None
    if not first or not last:
        return "-"
    return f"{max(abs(b / a - 1) for a, b in zip(first, last, strict=False)):.1e}"


def _break_even(found: dict[str, Any]) -> str:
    """Steps of training after which search and confirmation have paid for themselves."""
    samples = next((t["samples_per_step"] for t in found["trials"] if t["samples_per_step"]), None)
    repeats = found["repeats"] or {}
    best = next((r for who, r in repeats.items() if who != "baseline"), [])
    if found["winner"] == 0 or not best or not repeats.get("baseline") or not samples:
        return "-"
    saved_s = samples / statistics.median(repeats["baseline"]) - samples / statistics.median(best)
    return f"{math.ceil(found['spent_s'] / saved_s)}" if saved_s > 0 else "never"


def main() -> int:
    """Run the cases that were named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=(*CASES, "report"))
    parser.add_argument("--out", type=Path, default=Path("script_gpu.jsonl"))
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=240.0, help="of each search")
    parser.add_argument("--confirm-seconds", type=float, default=200.0, help="of each search")
    parser.add_argument("--reruns", type=int, default=2, help="without perfsearch, of each side")
    parser.add_argument("--micro-batch", type=int, help="the expert's, where memory allows another")
    parser.add_argument("--small", action="store_true", help="tiny models, on a CPU")
    options = parser.parse_args()
    if options.cases == ["report"]:
        report(options.out)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        for name in options.cases:
            found = run_case(name, Path(directory), options)
            print(json.dumps(found, indent=1), flush=True)
            with options.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
