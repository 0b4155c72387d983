"""What the metrics say, against truths that are known or read in another way, with real clocks.

    python benchmarks/metrics.py cpu --store STORE.jsonl
    python benchmarks/metrics.py gpu --store STORE.jsonl [--size large]
    python benchmarks/metrics.py report --store STORE.jsonl > benchmarks/results/diagnosis.md

Parts on processors (``cpu``): ``loader`` (one that sleeps), ``phases`` (they sum to the step),
``link`` (two ranks over a link that ``tc`` slows; needs root and network namespaces). On a GPU
(``gpu``): ``events`` (phases against torch's profiler for the same steps), ``smi`` (utilisation,
memory and power against nvidia-smi), ``cost`` (of light and full timings and of the sampler, on
against off, interleaved), ``tuning`` (MFU and diagnosis of GPT-2 before and after a search, on all
visible GPUs). ``bound --runs DIRECTORY...`` holds the confirmed gains of finished searches against
the bounds that were printed for them. Each part appends to the store as it goes and skips what is
there. Needs torch, numpy, psutil and pynvml, ``tuning`` scikit-learn.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _metrics_bounds
import _metrics_cpu
import _metrics_gpu
import _metrics_report
from _metrics_store import Store

Part = Callable[[Store], None]


def hardware(on_gpu: bool) -> str:
    """The GPUs that are seen, or the processors."""
    import os

    import torch

    if on_gpu and torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"{os.cpu_count()} processors, torch {torch.__version__}"


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    cpu: dict[str, Part] = {
        "loader": _metrics_cpu.loader,
        "phases": _metrics_cpu.phases,
        "link": _metrics_cpu.link,
    }
    gpu: dict[str, Part] = {
        "events": lambda store: _metrics_gpu.events(store, arguments.size),
        "smi": _metrics_gpu.smi,
        "cost": lambda store: _metrics_gpu.cost(
            store, arguments.size, arguments.blocks, arguments.device, arguments.samples
        ),
        "tuning": lambda store: _metrics_gpu.tuning(
            store, arguments.size, arguments.seconds, arguments.confirm_seconds, arguments.device
        ),
    }
    held: dict[str, Part] = {
        "bound": lambda store: _metrics_bounds.check(store, arguments.runs),
    }
    hidden: dict[str, Part] = {"link-rank": _metrics_cpu.link_rank}
    everything = {**cpu, **gpu, **held, **hidden}
    parser.add_argument("parts", nargs="+", choices=["cpu", "gpu", "report", *everything])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--note", default="", help="a line for the report, such as what ran beside")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run directories, `bound`")
    parser.add_argument("--size", default="large", help="GPT-2's, for the parts on a GPU")
    parser.add_argument("--device", default="cuda", help="cpu tries `cost` and `tuning` themselves")
    parser.add_argument("--blocks", type=int, default=30, help="of `cost`")
    parser.add_argument("--samples", type=int, help="a step of `cost`, where not the job's own")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the search of `tuning`")
    parser.add_argument("--confirm-seconds", type=float, default=240.0, help="after that search")
    arguments = parser.parse_args()
    wanted = [
        name
        for name in everything
        if name in arguments.parts
        or ("cpu" in arguments.parts and name in cpu)
        or ("gpu" in arguments.parts and name in gpu)
    ]
    if "report" in arguments.parts:
        print(_metrics_report.markdown(Store(arguments.store, ""), arguments.note), end="")
    for name in wanted:
        print(f"== {name} ({socket.gethostname()})", flush=True)
        everything[name](Store(arguments.store, hardware(name in gpu)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
