"""What instruments cost a step: with them against without, interleaved in one job.

    python benchmarks/overhead.py                         # two CPU processes
    python benchmarks/overhead.py --device cuda --nproc 4
    python benchmarks/overhead.py --device cuda --nproc 4 --model launched

Arms: ``plain`` (DistributedDataParallel alone, twice), ``tuned`` (a model that
``perfsearch.autotune`` has finished with), ``watched`` (the same with ``retune_on_drift``: every
step is timed), ``instrumented`` (as ``perfsearch-run --knobs`` leaves a script) and ``scored`` (as
``perfsearch-run --search`` times one: losses and batches of every step, phases and copies of as
many as a search would take of steps so long). On a GPU the model is GPT-2 small; ``--model
launched`` is one so small that the host launches its steps one by one, so that whatever the host
does beside adds to them.

The plain arms, ``instrumented`` and ``scored`` train one and the same model, as two of the same
kind differ by a percent, by where their memory lies; on a CPU each rank keeps to a core. Every
round trains a block of steps in each arm, in an order that is drawn anew; a block is compared with
each of the two plain blocks of its round (the second plain arm with the first). On a CPU a block is
a single step: there speed wanders within a tenth of a second by more than is to be told apart,
which neighbouring steps share. Every so many rounds it is one whose phases are timed.

Two estimates are given: the median ratio of the pairs, and the ratio of the arms' mean times, which
also sees what falls into few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _arms import BLOCKS, Arm, Surroundings
from _paired import compare

ARGUMENTS_VARIABLE = "OVERHEAD_ARGUMENTS"
ARMS = ("tuned", "watched", "instrumented", "scored")
NEVER = 10**6
AFTER_FIRST_STEPS = 100  # that a script has made when it is timed


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", choices=("small", "launched"), default="small", help="on a GPU")
    parser.add_argument("--steps", type=int, help="of a block; 20 on a GPU, else 1")
    parser.add_argument("--rounds", type=int, default=100_000, help="most rounds")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=ARMS, help="beside the plain ones"
    )
    parser.add_argument("--out", type=Path, help="file for every block's seconds")
    passed = os.environ.get(ARGUMENTS_VARIABLE)
    options = parser.parse_args(None if passed is None else json.loads(passed))
    options.steps = options.steps or (20 if options.device == "cuda" else 1)
    return options


def launch() -> int:
    """Start the ranks as torchrun does."""
    options = options_of()
    environment = {**os.environ, ARGUMENTS_VARIABLE: json.dumps(sys.argv[1:])}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.nproc}", __file__),
    ]
    return subprocess.run(command, env=environment, check=False).returncode


class Bench:
    """A rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.options = torch, dist, options
        local = int(os.environ["LOCAL_RANK"])
        self.on_gpu = options.device == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(local)
        self.device = torch.device("cuda", local) if self.on_gpu else torch.device("cpu")
        dist.init_process_group("nccl" if self.on_gpu else "gloo")
        from perfsearch.workloads.gpt import SIZES, Shape

        launched = Shape(8, 512, 8, vocabulary=8192, sequence_length=512)
        on_gpu = {"small": SIZES["small"], "launched": launched}
        self.shape = on_gpu[options.model] if self.on_gpu else SIZES["tiny"]
        samples = (options.steps * BLOCKS * 4, self.shape.sequence_length + 1)
        self.tokens = torch.randint(self.shape.vocabulary, samples)
        self.untouched = Surroundings()
        self._shared: Arm | None = None
        self._protocol: Any = None
        self._scored = 0  # blocks
        self._step_s = 0.0  # of the arm that was built first, which is plain
        if not self.on_gpu:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[local % len(cores)]})

    def model(self) -> Any:
        """A GPT, of the same weights each time."""
        from perfsearch.workloads.gpt import GPT

        self.torch.manual_seed(0)
        return GPT(self.shape).to(self.device)

    def arm(self, kind: str) -> Arm:
        """Build an arm and let it come to rest."""
        arm = self._tuned(kind) if kind in ("tuned", "watched") else self._of_script(kind)
        for _ in range(3):
            step_s = self.block(arm)
        self._step_s = self._step_s or step_s
        return arm

    def _made(self, kind: str) -> Arm:
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader

        net = DistributedDataParallel(self.model())
        optimizer = self.torch.optim.AdamW(net.parameters(), lr=1e-4)
        return Arm(kind, net, optimizer, DataLoader(self.tokens, batch_size=4))

    def _tuned(self, kind: str) -> Arm:
        """A model that tuning has finished with."""
        import perfsearch
        from perfsearch.online import rank

        self.untouched.restore()
        arm = self._made(kind)
        fixed = {
            "bucket_cap_mb": 25.0, "first_bucket_mb": 1.0, "gradient_as_bucket_view": False,
            "optimizer_implementation": "default", "hierarchical_group_size": 0,
        }  # fmt: skip
        rank._install_hook.cache_clear()  # each arm gets the hook for itself
        perfsearch.autotune(
            arm.net, knobs=fixed, retune_on_drift=kind == "watched", drift_tolerance=1e9,
            warmup_samples=0,
        )  # fmt: skip
        arm.surroundings = Surroundings()
        return arm

    def _of_script(self, kind: str) -> Arm:
        """The one model of these arms, with the instruments or without them."""
        from perfsearch.instrument.script import Script

        if self._shared is None:
            self.untouched.restore()
            script = Script({})
            self._shared = self._made("shared")
            self._shared.script, self._shared.surroundings = script, Surroundings()
        shared = self._shared
        arm = Arm(kind, shared.net, shared.optimizer, shared.loader)
        arm.script = shared.script if kind in ("instrumented", "scored") else None
        arm.surroundings = self.untouched if arm.script is None else shared.surroundings
        return arm

    def _score(self, script: Any) -> Any:
        """Have the script timed as in a trial that goes on from kept batches, in mid-window."""
        from perfsearch.instrument.rank import RankProtocol
        from perfsearch.training.clock import is_detailed

        if self._protocol is None:
            self._protocol = RankProtocol(script, None, self.dist.get_rank(), "")  # silent
            self._protocol.steps = AFTER_FIRST_STEPS
        optimizers, protocol = script.optimizers, self._protocol
        optimizers.before_step, optimizers.after_step = protocol.before_step, protocol.after_step
        script.loaders.tape.compares = False
        if script.loaders.tape.kept >= self.options.steps:
            script.loaders.tape.rewind(0)
        each, steps = self._each(), self.options.steps
        if steps < each:  # as if the window had begun so many steps before
            each = 1 if is_detailed(self._scored, each) else NEVER
        self._scored += 1
        protocol.score(steps + 1, each)
        return protocol

    def _each(self) -> int:
        """Of how many steps a search would have the phases of one timed."""
        from perfsearch.runners.base import Plan
        from perfsearch.training.clock import detailed_each, steps_to_fill

        plan = Plan(1)
        count = steps_to_fill(plan.scored_seconds, self._step_s, plan.scored_steps)
        return detailed_each(self._step_s, count)

    def block(self, arm: Arm) -> float:
        """Seconds of a step, on the slowest rank."""
        functional = self.torch.nn.functional
        assert arm.surroundings is not None
        arm.surroundings.restore()
        batches, protocol = arm.batches(), None
        if arm.script is not None:
            arm.script.losses.keeping = arm.script.loaders.counting = arm.kind == "scored"
            arm.script.optimizers.before_step = arm.script.optimizers.after_step = None
            protocol = self._score(arm.script) if arm.kind == "scored" else None
        self.dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self.options.steps):
            tokens = next(batches).to(self.device)
            logits = arm.net(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            arm.optimizer.step()
            arm.optimizer.zero_grad()
        self._synchronize()
        seconds_passed = time.perf_counter() - begin
        if protocol is not None:
            protocol.timing.end()
        steps = self.options.steps
        seconds = self.torch.tensor(seconds_passed / steps, device=self.device)
        self.dist.all_reduce(seconds, op=self.dist.ReduceOp.MAX)
        return float(seconds)

    def _synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()


def run_rank() -> int:
    options = options_of()
    bench = Bench(options)
    kinds = ["plain", "plain again", *options.arms]
    arms = {kind: bench.arm(kind) for kind in kinds}
    generator = random.Random(0)
    begin = time.monotonic()
    rounds, said = 0, max(1, 400 // options.steps)
    stop = bench.torch.zeros(1, device=bench.device)
    while rounds < options.rounds and not float(stop):
        order = list(arms)
        generator.shuffle(order)
        for kind in order:
            arms[kind].seconds.append(bench.block(arms[kind]))
        rounds += 1
        stop += time.monotonic() - begin > options.seconds
        bench.dist.all_reduce(stop, op=bench.dist.ReduceOp.MAX)
        if bench.dist.get_rank() == 0 and rounds % said == 0:
            print(f"{rounds} rounds, {time.monotonic() - begin:.0f} s", flush=True)
    if bench.dist.get_rank() == 0:
        base = arms["plain"].seconds
        print(f"\n{rounds} rounds of {options.steps} steps; {1e3 * statistics.median(base):.3f} ms")
        print("| arm | median of pairs | 95% interval | means | 95% interval | both < 1% |")
        print("|---|---|---|---|---|---|")
        for kind in kinds[1:]:
            references = [base] if kind == "plain again" else [base, arms["plain again"].seconds]
            middle, mean = compare(arms[kind].seconds, references, generator)
            verdict = "yes" if max(middle.high, mean.high) < 0.01 else "NO"
            print(f"| {kind} | {middle} | {mean} | {verdict} |")
        if options.out:
            options.out.write_text(json.dumps({kind: arms[kind].seconds for kind in kinds}))
    bench.dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(run_rank() if ARGUMENTS_VARIABLE in os.environ else launch())
