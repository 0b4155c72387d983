"""A training script whose steps are uneven, as scripts of people's are, with a clock of its own.

    python benchmarks/_uneven_job.py KIND [--steps 300] [--workers 0] [--clock FILE]

It writes when each step ended, so that whoever measures it can be compared with it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.data import DataLoader, Dataset

KINDS = ("even", "pause", "bursts", "lengths", "rollout", "saving", "validation")
LOAD_S = {"bursts": 2.5e-3}  # of a sample; loading is all that training waits for
BATCH = 16


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Vectors that take a while to load."""

    def __init__(self, count: int, load_s: float) -> None:
        self._count, self._load_s = count, load_s

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._load_s)
        return torch.randn(64, generator=torch.Generator().manual_seed(index)), index % 10


class SlowFile:
    """A file on a disk that takes its time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._slept = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        """Write, the first time slowly."""
        if not self._slept:
            self._slept = True
            time.sleep(0.15)
        return self._file.write(data)


def beside(kind: str, step: int, net: torch.nn.Module, workers: int, scratch: Path) -> None:
    """What the script does between two steps, beside training."""
    if kind == "pause" and step % 8 == 7:
        time.sleep(0.1)
    if kind == "rollout" and step % 20 == 19:
        time.sleep(0.3)
    if kind == "saving" and step % 10 == 9:
        with scratch.open("wb") as file:
            torch.save(net.state_dict(), SlowFile(file))
    if kind == "validation" and step % 12 == 11:
        with torch.no_grad():
            for x, _ in DataLoader(Samples(8 * BATCH, 1e-3), BATCH, num_workers=workers):
                net(x)
                time.sleep(8e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--clock", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("uneven_job.pt"))
    options = parser.parse_args()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Samples(BATCH * options.steps, LOAD_S.get(options.kind, 1e-3))
    lengths = torch.randint(8, 65, (options.steps,), generator=torch.Generator().manual_seed(1))
    seen: set[int] = set()
    ends: list[float] = []
    try:
        for step, (x, y) in enumerate(DataLoader(data, BATCH, num_workers=options.workers)):
            if options.kind == "lengths" and int(lengths[step]) % 24 not in seen:
                seen.add(int(lengths[step]) % 24)
                if len(seen) == 24:  # the script forgets its plans now and then
                    seen.clear()
                time.sleep(0.03)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            ends.append(time.perf_counter())
            beside(options.kind, step, net, options.workers, options.scratch)
    finally:  # also where whoever measures it ends it
        if options.clock is not None:
            options.clock.write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
