"""Tuning while it trains, from the worst of a measured grid: one command, under four minutes.

    python benchmarks/online_gpu.py            # 4 GPUs, NCCL over TCP on one host
    python benchmarks/online_gpu.py --nproc 2 --device cpu --small   # to see that it runs

First every point of a grid over step-scope knobs is timed. Then a model is trained from the
grid's worst point with ``perfsearch.autotune``, and the same model, from the same weights on the
same batches, without it, twice: from the worst point and from the best, since how gradients are put
into buckets changes how they are rounded. Last, what tuning kept, the grid's best and its worst are
timed in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGIN_VARIABLE, ARGUMENTS_VARIABLE = "ONLINE_GPU_BEGIN", "ONLINE_GPU_ARGUMENTS"
STEPS = 300
ROUNDS = 3


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=225.0, help="for everything")
    parser.add_argument("--transport", choices=("tcp", "default"), default="tcp")
    parser.add_argument("--out", type=Path, help="JSON with everything that was measured")
    passed = os.environ.get(ARGUMENTS_VARIABLE)  # torch's launcher would take some for its own
    return parser.parse_args(None if passed is None else json.loads(passed))


def launch() -> int:
    """Start the ranks as torchrun does."""
    options = options_of()
    environment = {
        **os.environ,
        BEGIN_VARIABLE: repr(time.time()),
        ARGUMENTS_VARIABLE: json.dumps(sys.argv[1:]),
    }
    if options.transport == "tcp":
        environment.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    environment.setdefault("OMP_NUM_THREADS", "4" if options.device == "cuda" else "1")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.nproc}", __file__),
    ]
    return subprocess.run(command, env=environment, check=False).returncode


class Bench:
    """A rank: builds the same model as often as needed, and times it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.options = torch, dist, options
        self.begin = float(os.environ[BEGIN_VARIABLE])
        local = int(os.environ["LOCAL_RANK"])
        if options.device == "cuda":
            torch.cuda.set_device(local)
        self.device = torch.device("cuda", local) if options.device == "cuda" else "cpu"
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        self.rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 + self.rank)
        vocabulary, length, batch = (64, 16, 2) if options.small else (8192, 512, 8)
        shape = (batch, length + 1)
        self.vocabulary = vocabulary
        self.batches = [
            torch.randint(vocabulary, shape, generator=generator).to(self.device) for _ in range(16)
        ]

    def say(self, text: str) -> None:
        """Print on rank 0, with the time since the command began."""
        if self.rank == 0:
            print(f"[{time.time() - self.begin:5.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        """Time that is left, the same on all ranks."""
        left = self.torch.tensor([self.options.seconds - (time.time() - self.begin)])
        return float(self.max_over_ranks(left)[0])

    def max_over_ranks(self, values: Any) -> list[float]:
        """Elementwise maximum."""
        moved = values.to(self.device, self.torch.float64)
        self.dist.all_reduce(moved, op=self.dist.ReduceOp.MAX)
        return [float(v) for v in moved.tolist()]

    def module(self) -> Any:
        """The model, from the same weights each time."""
        from perfsearch.workloads.gpt import GPT, Shape

        self.torch.manual_seed(0)
        size = (2, 64, 2) if self.options.small else (8, 768, 12)
        shape = Shape(*size, vocabulary=self.vocabulary, sequence_length=self.batches[0].shape[1])
        return GPT(shape).to(self.device)

    def wrap(self, configuration: dict[str, Any]) -> tuple[Any, Any, Any]:
        """A new model under a configuration, its optimizer, and the switch of that."""
        from torch.nn.parallel import DistributedDataParallel

        from perfsearch.online.ddp import make_tunable
        from perfsearch.online.optimizer import ImplementationSwitch

        ids = [self.device.index] if self.options.device == "cuda" else None
        net = DistributedDataParallel(self.module(), device_ids=ids)
        make_tunable(net)
        optimizer = self.torch.optim.AdamW(net.parameters(), lr=3e-4)
        switch = ImplementationSwitch(optimizer)
        self.set(net, switch, configuration)
        return net, optimizer, switch

    def set(self, net: Any, switch: Any, configuration: dict[str, Any]) -> None:
        """Put a configuration into force."""
        from perfsearch.online.ddp import rewrap

        rewrap(net, configuration)
        switch.apply(configuration["optimizer_implementation"])

    def step(self, net: Any, optimizer: Any, number: int) -> Any:
        """One step of training; the loss stays on the device."""
        functional = self.torch.nn.functional
        tokens = self.batches[number % len(self.batches)]
        enabled = self.options.device == "cuda"
        with self.torch.autocast(self.options.device, self.torch.bfloat16, enabled=enabled):
            logits = net(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.options.device == "cuda":
            self.torch.cuda.synchronize()

    def timed(self, net: Any, optimizer: Any, discard: int, score: int) -> float:
        """Median seconds of a step on the slowest rank."""
        seconds = []
        for number in range(discard + score):
            begin = time.perf_counter()
            self.step(net, optimizer, number)
            self.synchronize()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(self.max_over_ranks(self.torch.tensor(seconds[discard:])))

    def train(self, net: Any, optimizer: Any, steps: int) -> tuple[list[float], float]:
        """Losses averaged over ranks, and seconds."""
        losses = []
        self.synchronize()
        begin = time.perf_counter()
        for number in range(steps):
            losses.append(self.step(net, optimizer, number))
        self.synchronize()
        seconds = time.perf_counter() - begin
        stacked = self.torch.stack(losses).double()
        self.dist.all_reduce(stacked)
        return (stacked / self.dist.get_world_size()).tolist(), seconds


def grid(bench: Bench) -> list[dict[str, Any]]:
    """Every point of the grid."""
    world = bench.dist.get_world_size()
    sizes = [0, world // 2] if world >= 4 else [0]
    caps = (0.25, 1.0, 25.0) if bench.options.small else (1.0, 4.0, 25.0, 64.0, 256.0)
    implementations = ("default", "fused")
    return [
        {
            "bucket_cap_mb": cap,
            "first_bucket_mb": min(1.0, cap),
            "gradient_as_bucket_view": view,
            "hierarchical_group_size": size,
            "optimizer_implementation": implementation,
        }
        for size, cap, view, implementation in itertools.product(
            sizes, caps, (False, True), implementations
        )
    ]


def measure_grid(bench: Bench) -> list[tuple[float, dict[str, Any]]]:
    points = grid(bench)
    net, optimizer, switch = bench.wrap(points[0])
    bench.timed(net, optimizer, 5, 5)
    found = []
    for place, point in enumerate(points):
        bench.set(net, switch, point)
        seconds = bench.timed(net, optimizer, 3, 5)
        found.append((seconds, point))
        bench.say(f"grid {place + 1}/{len(points)}: {1e3 * seconds:8.2f} ms a step  {point}")
        if bench.left_s() < 0.6 * bench.options.seconds:
            bench.say("the grid's share of the time is over")
            break
    return sorted(found, key=lambda pair: pair[0])


def smooth(losses: list[float], width: int = 16) -> list[float]:
    """Means over a window: the batches repeat with this period."""
    return [
        statistics.fmean(losses[i : i + width]) for i in range(0, len(losses) - width + 1, width)
    ]


def furthest(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def run_rank() -> int:
    options = options_of()
    bench = Bench(options)
    import perfsearch
    from perfsearch.online.ddp import configuration_of

    ranked = measure_grid(bench)
    (best_s, best), (worst_s, worst) = ranked[0], ranked[-1]
    bench.say(f"grid's best {1e3 * best_s:.2f} ms {best}")
    bench.say(f"grid's worst {1e3 * worst_s:.2f} ms {worst}; spread {worst_s / best_s - 1:.1%}")

    log = Path(tempfile.mkdtemp()) / "tuning.csv"
    net, optimizer, _ = bench.wrap(worst)
    perfsearch.autotune(net, log_file=log)
    tuned, tuned_s = bench.train(net, optimizer, options.steps)
    kept = configuration_of(net)
    group = optimizer.param_groups[0]
    fused = "fused" if group["fused"] else "foreach" if group["foreach"] else "default"
    kept["optimizer_implementation"] = fused
    bench.say(f"tuned: {options.steps} steps in {tuned_s:.1f} s")

    plain_net, plain_optimizer, _ = bench.wrap(worst)
    plain, plain_s = bench.train(plain_net, plain_optimizer, options.steps)
    bench.say(f"left alone: {options.steps} steps in {plain_s:.1f} s")
    other_net, other_optimizer, _ = bench.wrap(best)
    other, _ = bench.train(other_net, other_optimizer, options.steps)

    net, optimizer, switch = bench.wrap(worst)
    arms = {"kept": kept, "grid's best": best, "grid's worst": worst}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(ROUNDS):
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            bench.set(net, switch, arms[name])
            times[name].append(bench.timed(net, optimizer, 4, 8))
    if bench.rank == 0:
        report(bench, log, times, {"tuned": tuned, "plain": plain, "other": other},
               {"tuned": tuned_s, "plain": plain_s}, ranked, kept)  # fmt: skip
    bench.dist.barrier()
    bench.dist.destroy_process_group()
    return 0


def report(
    bench: Bench,
    log: Path,
    times: dict[str, list[float]],
    losses: dict[str, list[float]],
    seconds: dict[str, float],
    ranked: list[tuple[float, dict[str, Any]]],
    kept: dict[str, Any],
) -> None:
    import csv

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = rows[-1]
    middle = {name: statistics.median(values) for name, values in times.items()}
    plain = losses["plain"]
    spread = ranked[-1][0] / ranked[0][0] - 1
    over = middle["kept"] / middle["grid's best"] - 1
    print(f"\ngrid: {len(ranked)} points, worst {spread:+.1%} over the best")
    print(f"tuning ended at step {last['train_iter']} ({last['status']}): {last['reason']}")
    print(f"kept: {kept}")
    print("| arm | ms a step, median of three in turn (range) | over the grid's best |")
    print("|---|---|---|")
    for name, values in times.items():
        low, high = 1e3 * min(values), 1e3 * max(values)
        ratio = middle[name] / middle["grid's best"] - 1
        print(f"| {name} | {1e3 * middle[name]:.2f} ({low:.2f} to {high:.2f}) | {ratio:+.1%} |")
    print(f"{len(plain)} steps: tuned {seconds['tuned']:.1f} s, tuning included; "
          f"left alone {seconds['plain']:.1f} s")  # fmt: skip
    print(f"losses, left alone: {plain[0]:.4f} to {statistics.fmean(plain[-16:]):.4f}; largest "
          "relative difference to that:")  # fmt: skip
    for name, words in (("tuned", "tuned"), ("other", "left alone at the grid's best point")):
        away = furthest(smooth(losses[name]), smooth(plain))
        print(f"- {words}: {furthest(losses[name][:20], plain[:20]):.1e} in the first 20 steps, "
              f"{away:.1e} in means of 16 steps")  # fmt: skip
    within = over <= 0.05 and last["status"] == "ok" and int(last["train_iter"]) <= STEPS
    print(f"within 5% of the grid's best in at most {STEPS} steps: {'yes' if within else 'NO'}")
    print(f"spread of at least 15%: {'yes' if spread >= 0.15 else 'NO'}")
    if bench.options.out is not None:
        everything = {
            "grid": ranked, "times_s": times, "kept": kept, "log": rows, "losses": losses,
            "seconds": seconds,
            "finite": all(math.isfinite(v) for curve in losses.values() for v in curve),
        }  # fmt: skip
        bench.options.out.write_text(json.dumps(everything))


if __name__ == "__main__":
    sys.exit(run_rank() if ARGUMENTS_VARIABLE in os.environ else launch())
