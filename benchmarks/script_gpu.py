"""Unchanged scripts on real GPUs: what a search finds over an expert's settings.

    python benchmarks/script_gpu.py CASE... [--out results.jsonl] [--nproc 4]
    python benchmarks/script_gpu.py report --out results.jsonl

Cases, each with a baseline that is tuned by hand as an expert would do it from the manuals:

- ``trainer-fsdp``: the HF Trainer with FSDP on a Llama of about 1.4 billion parameters, bf16. The
  expert: the largest micro-batch that a first try fits with activation checkpointing on, as the
  Trainer's guide says, its fused AdamW, two loader processes.
- ``ddp-tcp``: a plain DDP script over NCCL's TCP sockets on one host (P2P and shared memory off),
  0.1 billion parameters. The expert leaves buckets, optimizer and sockets as they are shipped.
- ``nothing``: the same script over NVLink with a batch so large that computing is all there is.
- ``oom``: ``trainer-fsdp`` without checkpointing and with a micro-batch that does not fit.

After the search ``best/apply/run.sh`` and the same command with the baseline's settings are run
with perfsearch blocked from import, and the throughput that the script itself prints is read.
Needs torch, transformers and accelerate, numpy, psutil, pynvml, scikit-learn and PyYAML.
"""

from __future__ import annotations

import argparse
import json
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

from perfsearch import assemble  # noqa: E402
from perfsearch.config import validate  # noqa: E402

SCRIPTS = ROOT / "examples" / "scripts"
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
LLAMA = ["--hidden_size", "2048", "--layers", "20", "--heads", "16", "--vocabulary", "32000",
         "--sequence_length", "1024"]  # fmt: skip
TRAINER = [
    str(SCRIPTS / "hf_trainer.py"), "--output_dir", "out", "--max_steps", "{steps}",
    "--bf16", "True", "--save_strategy", "no",
    "--fsdp", "full_shard auto_wrap", "--dataloader_num_workers", "2", "--logging_steps", "1000",
    *LLAMA,
]  # fmt: skip
PLAIN = [str(SCRIPTS / "ddp_train.py"), "--epochs", "{steps}"]

CASES: dict[str, dict[str, Any]] = {
    "trainer-fsdp": {
        "runner": "zero",
        "command": [*TRAINER, "--per_device_train_batch_size", "8", "--gradient_checkpointing",
                    "True"],
        "preset": "hf-trainer",
        "rerun_steps": 25,
    },
    "ddp-tcp": {
        "runner": "ddp",
        "command": [*PLAIN, "--width", "4096", "--batch-size", "256"],
        "environ": TCP,
        "rerun_steps": 4,
    },
    "nothing": {
        "runner": "ddp",
        "command": [*PLAIN, "--width", "4096", "--batch-size", "1024"],
        "rerun_steps": 12,
    },
    "oom": {
        "runner": "zero",
        "command": [*TRAINER, "--per_device_train_batch_size", "64"],
        "preset": "hf-trainer",
        "rerun_steps": 8,
    },
}  # fmt: skip


def run_case(name: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Search one case, run what it hands over, and return the figures."""
    case, nproc = CASES[name], options.nproc
    os.environ.update(case.get("environ", {}))
    run_dir = directory / name
    workload: dict[str, Any] = {
        "name": "script",
        "command": [word.format(steps=1_000_000) for word in case["command"]],
    }
    if "preset" in case:
        workload["preset"] = case["preset"]
    settings = validate(
        {
            "runner": {"name": case["runner"]},
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
    assemble.run(settings)
    spent_s = time.time() - begin
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    found: dict[str, Any] = {
        "case": name,
        "verdict": summary["verdict"],
        "speed_up": summary.get("speed_up"),
        "repeats": summary.get("repeats"),
        "unit": summary.get("unit"),
        "device_minutes": spent_s * nproc / 60,
        "differs": _differences(run_dir),
        "gpu": summary["provenance"]["identity"]["gpu"],
    }
    plain = [word.format(steps=case["rerun_steps"]) for word in case["command"]]
    rates: dict[str, list[float]] = {"baseline": [], "handed over": []}
    for _ in range(2):  # in turn, so that a drift meets both
        rates["handed over"].append(_handed_over(run_dir, case["rerun_steps"]))
        rates["baseline"].append(_rate([*_torchrun(nproc), *plain], run_dir))
    found["without_perfsearch"] = {who: statistics.mean(r) for who, r in rates.items()}
    return found


def _differences(run_dir: Path) -> str:
    import yaml

    return str(yaml.safe_load((run_dir / "best" / "config.yaml").read_text())["runner"]["knobs"])


def _torchrun(nproc: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={nproc}"]  # fmt: skip


def _handed_over(run_dir: Path, steps: int) -> float:
    """What ``run.sh`` reaches; its endless number of steps is cut, nothing else."""
    script = run_dir / "best" / "apply" / "run.sh"
    text = script.read_text().replace("1000000", str(steps))
    text = text.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ", 1)
    short = script.with_name("run-short.sh")
    short.write_text(text)
    return _rate(["sh", str(short)], run_dir)


def _rate(command: list[str], run_dir: Path) -> float:
    """Samples a second that the script prints, with perfsearch blocked; 0.0 where it fails."""
    blocked = run_dir / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "perfsearch.py").write_text("raise ImportError('perfsearch is not here')\n")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
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
    print("| case | speed-up (95% interval) | before | after | without perfsearch, before -> after "
          "| device-minutes | found |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in file.read_text().splitlines():
        found = json.loads(line)
        ratio, repeats = found["speed_up"], found["repeats"] or {}
        shown = found["verdict"]
        if ratio:
            shown = f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        best = next((r for who, r in repeats.items() if who != "baseline"), [])
        sides = [repeats.get("baseline", []), best]
        rates = [f"{statistics.median(s):.1f} {found['unit']}" if s else "-" for s in sides]
        alone = found["without_perfsearch"]
        again = f"{alone['baseline']:.1f} -> {alone['handed over']:.1f} samples/s"
        cells = [found["case"], shown, *rates, again, f"{found['device_minutes']:.1f}",
                 found["differs"]]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def main() -> int:
    """Run the cases that were named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=(*CASES, "report"))
    parser.add_argument("--out", type=Path, default=Path("script_gpu.jsonl"))
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=240.0, help="of each search")
    parser.add_argument("--confirm-seconds", type=float, default=200.0, help="of each search")
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
