"""How often ``perfsearch compare`` is right on real starts, with other work beside them.

    python benchmarks/compare_real.py [--same 40] [--slower 10] [--load 1]
    python benchmarks/compare_real.py --device cuda --same 10 --slower 5 --load 0

A loop of known work is compared with itself (wanted: at most 2 of 40 claim a difference), and with
the same loop 5% longer (wanted: found in at least 9 of 10). Meanwhile other processes work and
pause at random. The starts of a block are measured in turns, as ``perfsearch compare`` has it
(``--one-at-a-time``: one after the other).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
work, device = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(64, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(65536, 64), torch.randn(65536, 1))
size = 2048 if device == "cuda" else 128
matrix = torch.randn(size, size, device=device) / size**0.5
for epoch in range(100):
    for x, y in DataLoader(data, batch_size=32):
        for _ in range(work):
            torch.mm(matrix, matrix)
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

LOAD = """
import os, random, sys, time
generator, parent = random.Random(int(sys.argv[1])), os.getppid()
while os.getppid() == parent:
    end = time.monotonic() + generator.uniform(0.5, 6)
    while time.monotonic() < end:
        sum(i * i for i in range(1000))
    time.sleep(generator.uniform(0.5, 10))
"""

WORK = {"cpu": 200, "cuda": 60}
"""Products of matrices in a step: the step's time is theirs, so that 5% more are 5% longer."""

NAMES = {0: "faster", 4: "no difference", 5: "slower"}


def _work(options: argparse.Namespace) -> int:
    return WORK[options.device]


def compare(
    directory: Path, other: int, seed: int, options: argparse.Namespace
) -> dict[str, object]:
    """One comparison; its exit code, interval, starts and seconds."""
    begin = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "perfsearch.cli.search", "compare"),
            *(f"work.py {work} {options.device}" for work in (_work(options), other)),
            *("--no-tracking", "--seed", str(seed)),
            *("--max-starts", str(options.max_starts), "--json", "out.json"),
            *(["--one-at-a-time"] if options.one_at_a_time else []),
        ],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads((directory / "out.json").read_text())
    arm = found["arms"][1]
    return {
        "code": done.returncode,
        "interval": arm["interval"],
        "starts": len(arm["rates"]),
        "seconds": time.monotonic() - begin,
    }


def main() -> int:
    """Run the comparisons and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--same", type=int, default=40, help="comparisons of a loop with itself")
    parser.add_argument("--slower", type=int, default=10, help="with the same 5%% longer")
    parser.add_argument("--load", type=int, default=1, help="processes of other work")
    parser.add_argument("--device", choices=sorted(WORK), default="cpu")
    parser.add_argument("--max-starts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-at-a-time", action="store_true", help="no starts in turns")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = _work(options)
    cases = [(work, "same")] * options.same + [(work * 105 // 100, "5% longer")] * options.slower
    random.Random(options.seed).shuffle(cases)
    counts: dict[str, Counter[str]] = {}
    beside = [subprocess.Popen([sys.executable, "-c", LOAD, str(n)]) for n in range(options.load)]
    try:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "work.py").write_text(SCRIPT)
            for number, (other, case) in enumerate(cases):
                found = compare(directory, other, options.seed + number, options)
                answer = NAMES.get(int(str(found["code"])), f"exit {found['code']}")
                counts.setdefault(case, Counter())[answer] += 1
                print(f"{case}: {answer} {json.dumps(found)}", flush=True)
    finally:
        for process in beside:
            process.kill()
            process.wait()
    for case, answers in counts.items():
        print(f"{case}: {dict(answers)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
