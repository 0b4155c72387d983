"""Models of public packages by ``runner=soap``: captured or not, split how far, trained right.

    pip install -r benchmarks/soap_models_requirements.txt     # in an environment of its own
    python benchmarks/soap_models.py run --store FILE.jsonl [--models resnet18 ...]
    python benchmarks/soap_models.py report --store FILE.jsonl > benchmarks/results/soap_models.md

Each model has random weights and small settings of its own configuration; nothing is downloaded.
It is captured once; then three processes train five steps over gloo in float64, under data
parallelism and under three random plans, and losses and weights are compared with those of one
process. A model is right where the largest difference is that of rounding: up to 1e-8, up to 1e-4
where the model itself computes in float32 within, or, if that is more, up to a hundred times what
one process differs by whose weights are off by 1e-15. Differences are relative to a tensor's
largest element, or to 1e-3 if that is larger: biases that cancel are rounding alone.
Finished models are not run again: remove their line from the store.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.multiprocessing
from _soap_model_cases import BATCH, CASES, Case
from _store import Store
from torch import nn
from torch.utils._pytree import tree_flatten

from perfsearch.soap.capture.capture import Captured, capture
from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.executor.exchange import Communicators
from perfsearch.soap.executor.execute import Execution
from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import (
    OperatorConfiguration,
    Plan,
    choices,
    data_parallel,
    left_on_one_device,
)

DEVICES, STEPS, PLANS, SEED = 3, 5, 3, 11
TOLERANCE, SINGLE_TOLERANCE = 1e-8, 1e-4
PERTURBED, TIMES = 1e-15, 100.0
LEAST_SCALE = 1e-3
MOST_TOLERANCE = 1e-3
"""Beyond, a difference says nothing."""
LIMIT_S = 240.0
"""Of the processes of one model, so that one that hangs is a finding and not the end."""
WANTED_SHARE = 0.05

CPU = torch.device("cpu")


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Not one that divides by gradients: rounding where these are zero would decide the step."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def alone(model: nn.Module, loss: Any, batches: list[Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights at the end, by one process."""
    model = copy.deepcopy(model)
    stepper = optimizer_of(model.parameters())
    torch.manual_seed(SEED)
    losses = []
    for batch in batches:
        stepper.zero_grad()
        value = loss(model, batch)
        value.backward()
        losses.append(value.item())
        stepper.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def amplified(model: nn.Module, loss: Any, batches: list[Any], reference: Any) -> float:
    """What becomes of differences like those of rounding in one process."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + PERTURBED * noise)
    losses, weights = alone(model, loss, batches)
    pairs = zip(losses, reference[0], strict=True)
    worst = max(abs(a - b) / max(abs(b), LEAST_SCALE) for a, b in pairs)
    for key, whole in reference[1].items():
        worst = _larger(worst, relative(weights[key], whole, whole))
    return worst


def relative(mine: torch.Tensor, theirs: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest difference, over the largest element of the whole tensor."""
    scale = whole.abs().max().clamp(min=LEAST_SCALE)
    return float(((mine - theirs).abs().max() / scale).item()) if mine.numel() else 0.0


def random_plan(graph: Graph, rng: random.Random) -> Plan:
    """Random parts of every operator, on random devices in random order."""
    plan = {}
    for operator in graph.planned:
        degrees = rng.choice(choices(operator, DEVICES))
        parts = 1
        for degree in degrees:
            parts *= degree
        plan[operator.name] = OperatorConfiguration(
            degrees, tuple(rng.sample(range(DEVICES), parts))
        )
    return plan


def difference(
    captured: Captured, plan: Plan, model: nn.Module, batches: list[Any], reference: Any
) -> float:
    """The largest one of this rank from one process, over the tensor's largest element."""
    losses, weights = reference
    model = copy.deepcopy(model)
    execution = Execution(captured, plan, model, CPU, difference.groups)  # type: ignore[attr-defined]
    stepper = optimizer_of(execution.parameters.values()) if execution.parameters else None
    torch.manual_seed(SEED)
    low, high = execution.samples
    worst = 0.0
    for step, batch in enumerate(batches):
        share = execution.step([leaf[low:high] for leaf in tree_flatten(batch)[0]])
        if stepper is not None:
            execution.apply_gradients(stepper)
        total = share.double().clone()
        dist.all_reduce(total)
        worst = _larger(
            worst, abs(total.item() - losses[step]) / max(abs(losses[step]), LEAST_SCALE)
        )
    for key, mine in execution.parameters.items():
        whole = weights[key].view(execution.shapes[key])
        theirs = whole[tuple(slice(*span) for span in execution.stored(key))]
        worst = _larger(worst, relative(mine.detach(), theirs, whole))
    return worst


def _larger(a: float, b: float) -> float:
    return b if not b <= a else a  # what is no number is larger than any


def rank_main(rank: int, directory: str, work: tuple[Any, ...], answers: Any) -> None:
    """One of the processes of a model."""
    captured, plans, model, batches, reference = work
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=DEVICES
        )
        difference.groups = Communicators(CPU)  # type: ignore[attr-defined]
        found = [difference(captured, plan, model, batches, reference) for plan in plans]
        answers.put((rank, found, ""))
    except Exception as error:
        answers.put((rank, [], f"{type(error).__name__}: {error}"))
        if "PERFSEARCH_TRACE" in os.environ:
            traceback.print_exc()
    answers.close()
    answers.join_thread()
    os._exit(0)  # without waiting for peers that have failed


def executed(work: tuple[Any, ...]) -> tuple[list[float], str]:
    """Differences by plan, or why there are none."""
    context = torch.multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        answers = context.Queue()
        arguments = [(rank, directory, work, answers) for rank in range(DEVICES)]
        ranks = [context.Process(target=rank_main, args=a, daemon=True) for a in arguments]
        for process in ranks:
            process.start()
        found: list[tuple[int, list[float], str]] = []
        until = time.monotonic() + LIMIT_S
        while len(found) < DEVICES and time.monotonic() < until:
            try:
                found.append(answers.get(timeout=1.0))
            except Exception:
                continue
            if found[-1][2]:
                break
        for process in ranks:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    failures = [why for _, _, why in found if why]
    if failures:
        return [], failures[0]
    if len(found) < DEVICES:
        return [], f"no answer within {LIMIT_S:g} s"
    worst = [0.0] * len(work[1])
    for _, mine, _ in found:
        worst = [_larger(a, b) for a, b in zip(worst, mine, strict=True)]
    return worst, ""


def in_single_precision(captured: Captured) -> bool:
    """Whether the model casts to float32 by itself."""
    return any(
        stage.dtype == "float32" or operator.dtype == "float32"
        for operator in captured.graph.operators
        for stage in operator.stages
    )


def examined(case: Case) -> dict[str, Any]:
    """What there is to say of a model."""
    begin = time.monotonic()
    record: dict[str, Any] = {}
    try:
        model, loss = case.make()
        batches = [case.batch(seed) for seed in range(STEPS)]
        record["parameters"] = sum(p.numel() for p in model.parameters())
        reference = alone(model, loss, batches)
        captured = capture(model, loss, batches[0])
    except CaptureError as error:
        return {**record, "refused": str(error), "seconds": time.monotonic() - begin}
    except Exception as error:
        if "PERFSEARCH_TRACE" in os.environ:
            traceback.print_exc()
        record["crashed"] = f"{type(error).__name__}: {error}"
        return {**record, "seconds": time.monotonic() - begin}
    graph = captured.graph
    left = left_on_one_device(graph)
    record["operators"] = len(graph.planned)
    record["left"] = left.share
    record["causes"] = [
        (o.name, str(o.attributes.get("target", o.kind)), share) for o, share in left.causes[:3]
    ]
    record["amplified"] = amplified(model, loss, batches, reference)
    record["single"] = in_single_precision(captured)
    rng = random.Random(9)
    plans = [data_parallel(graph, range(DEVICES))]
    plans += [random_plan(graph, rng) for _ in range(PLANS)]
    errors, why = executed((captured, plans, model, batches, reference))
    return {**record, "errors": errors, "failed": why, "seconds": time.monotonic() - begin}


def verdict(record: dict[str, Any]) -> str:
    """In a word."""
    for name in ("refused", "crashed", "failed"):
        if record.get(name):
            return name
    limit = SINGLE_TOLERANCE if record["single"] else TOLERANCE
    limit = max(limit, TIMES * record["amplified"])
    if all(error <= limit for error in record["errors"]):
        return "right" if limit <= MOST_TOLERANCE else "unclear"
    return "wrong"


def without_place(message: str) -> str:
    """A message in one line, without the path of the file that it names at its end."""
    return re.sub(r"; (the loss function|/\S+:\d+)$", "", " ".join(message.split()))[:200]


def report(store: Store) -> str:
    """The page."""
    order = [case.key for case in CASES]
    rows = sorted(store.of("model"), key=lambda row: order.index(row["key"]))
    verdicts = [verdict(row) for row in rows]
    counts = {word: verdicts.count(word) for word in dict.fromkeys(verdicts)}
    run = [row for row in rows if "left" in row]
    little = sum(row["left"] < WANTED_SHARE for row in run)
    lines = [
        "# Models of public packages by `runner=soap`",
        "",
        "**Question**: which models of other people does it take, how much of each does data",
        "parallelism leave on one device, and does it train them as one process does?",
        "",
        "```sh",
        "python benchmarks/soap_models.py run --store FILE.jsonl",
        "python benchmarks/soap_models.py report --store FILE.jsonl",
        "```",
        "",
        f"{len(rows)} models at small settings of their own, {DEVICES} gloo processes, a batch of "
        f"{BATCH}, {STEPS} steps",
        f"of SGD in float64, under data parallelism and {PLANS} random plans; torch "
        f"{torch.__version__.split('+')[0]}.",
        "",
        "**Answer**: "
        + ", ".join(f"{number} {word}" for word, number in counts.items())
        + f". Of the {len(run)} that were captured, {little} leave less than {WANTED_SHARE:.0%} of "
        "the forward FLOPs on one device.",
        "",
        "Difference: the largest of losses and weights, over the tensor's largest element; right",
        f"is up to {TOLERANCE:g}, {SINGLE_TOLERANCE:g} where the model casts to float32 (*), or",
        f"{TIMES:g} times what one process differs by with weights off by {PERTURBED:g} (own).",
        "",
        "| package | model | operators | on one device | own | data parallel | random plans | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row, word in zip(rows, verdicts, strict=True):
        package, name = row["key"].split(" ")
        if "left" not in row:
            why = without_place(row.get("refused") or row["crashed"])
            lines.append(f"| {package} | {name} | | | | | | {word}: {why} |")
            continue
        mark = "*" if row["single"] else ""
        errors = [f"{error:.1g}" for error in row["errors"]]
        first, rest = (errors[0], ", ".join(errors[1:])) if errors else ("", "")
        causes = ", ".join(f"{target} {share:.1%}" for _, target, share in row["causes"])
        named = f"; {causes}" if row["left"] >= WANTED_SHARE else ""
        why = f": {without_place(row['failed'])}" if row["failed"] else ""
        lines.append(
            f"| {package} | {name}{mark} | {row['operators']} | {row['left']:.1%} | "
            f"{row['amplified']:.1g} | {first} | "
            f"{rest} | {word}{why}{named} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--models", nargs="*", help="only these")
    arguments = parser.parse_args()
    store = Store(arguments.store)
    if arguments.what == "report":
        print(report(store), end="")
        return 0
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for case in CASES:
        if store.has("model", case.key) or case.name not in (arguments.models or [case.name]):
            continue
        record = examined(case)
        store.add("model", case.key, **record)
        said = record.get("refused") or record.get("crashed") or record.get("failed") or ""
        errors = ", ".join(f"{error:.1g}" for error in record.get("errors", []))
        left = f"{record['left']:.1%} left" if "left" in record else ""
        print(f"{case.key}: {verdict(record)} {left} {errors} {' '.join(said.split())[:300]} "
              f"({record['seconds']:.0f} s)", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
