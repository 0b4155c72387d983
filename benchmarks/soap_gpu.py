"""`runner=soap` on real GPUs: what a search finds against data parallelism and a hand's work.

    python benchmarks/soap_gpu.py PART... --store STORE.jsonl [--ranks 4] [--until-s 540]
    python benchmarks/soap_gpu.py report --store STORE.jsonl > benchmarks/results/soap.md

Parts, in their order; ``all`` is all of them:

    ddp      DLRM under DistributedDataParallel with dense gradients, its knobs searched
    search   SOAP searches over DLRM, wide fully connected layers, and convolutions
    side     DLRM, in turn: DDP as it comes, DDP tuned, DDP with sparse gradients, two tables a
             device by hand (as a program, and as a plan), and what the search found;
             the other models: data parallelism and what was found
    drawn    plans drawn by seed, simulated and measured; the costs know none of them

Each part appends to the store as it goes and skips what is there, so a part that was cut short goes
on where it ended. Searches keep their run directories beside the store. Needs the extra ``soap``.
``SOAP_BENCH_SCALE=small ... --device cpu --ranks 2`` tries it out without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _soap_report
from _soap_bench import HERE, MODELS, Bench, visit, with_repository
from _store import Store

from perfsearch.runners.soap import space
from perfsearch.runners.soap.runner import Soap
from perfsearch.soap import formats
from perfsearch.soap.plan import OperatorConfiguration, OperatorTime, Plan, data_parallel

ROUNDS = 5
DRAWN = 6
"""Plans drawn for each model."""
DRIFTS = (2, 4, 8, 16)
"""Random changes away from data parallelism of a drawn plan, in turn."""


def tune_ddp(bench: Bench) -> None:
    """Search DDP's knobs for DLRM with dense gradients."""
    if bench.store.has("ddp", "best"):
        return
    run_dir = bench.directory / "ddp-dlrm"
    dropped = [
        "nccl_nsocks_perthread", "nccl_socket_nthreads", "nccl_algo", "nccl_proto",
        "nccl_min_ctas", "nccl_max_ctas", "nccl_buffsize", "omp_num_threads",
        "hierarchical_group_size", "channels_last", "cudnn_benchmark", "compile_mode",
    ]  # fmt: skip
    more = ["strategy=bayes", "budget.trials=12", *bench.confirmed]
    more += [f"~runner.knobs.{name}" for name in dropped]  # these would start processes anew
    code = bench.command("ddp", "dlrm", MODELS["dlrm"], run_dir, *more)
    if code == 0:
        summary = json.loads((run_dir / "best" / "summary.json").read_text())
        bench.store.add("ddp", "best", knobs=summary["knobs"], verdict=summary["verdict"])


def searches(bench: Bench) -> None:
    """Search each model as a user does."""
    for model, batch in MODELS.items():
        if bench.store.has("search", model) or bench.seconds_left() < 30:
            continue
        run_dir = bench.directory / f"search-{model}"
        cache = f"runner.cache={bench.directory / 'cache'}"
        more = ["strategy=mcmc", "strategy.proposals=1000000", "budget.trials=6", cache]
        more += bench.confirmed
        code = bench.command("soap", model, batch, run_dir, *more)
        if code == 0:
            summary = json.loads((run_dir / "best" / "summary.json").read_text())
            text = (run_dir / "best" / "apply" / "strategy.yaml").read_text()
            kept = {k: summary[k] for k in ("verdict", "is_baseline", "speed_up")}
            bench.store.add("search", model, strategy=text, **kept)


def two_tables_each(runner: Soap) -> Plan:
    """Tables whole, in order, the same number on each device; the rest over samples."""
    graph = runner.inputs.graph
    plan = data_parallel(graph, range(runner.devices))
    tables = [o for o in graph.planned if o.kind in ("embedding", "embedding_bag")]
    for place, table in enumerate(tables):
        device = place * runner.devices // len(tables)
        plan[table.name] = OperatorConfiguration((1,) * len(table.shape), (device,))
    return plan


def found_plan(bench: Bench, runner: Soap, model: str) -> Plan:
    """What the search of a model handed over."""
    record = next(r for r in bench.store.of("search") if r["key"] == model)
    return formats.parse_plan(record["strategy"], runner.inputs.graph, runner.devices)


def by_hand(bench: Bench) -> dict[str, Any]:
    """The program written by hand, in processes of its own."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={bench.ranks}", "_soap_hand.py"]  # fmt: skip
    environment = with_repository()
    if bench.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    made = subprocess.run(
        line, cwd=HERE, env=environment, capture_output=True, text=True, timeout=240
    )
    if made.returncode:
        told = [line for line in made.stderr.splitlines() if "Error" in line]
        return {"status": "crash", "reason": (told or [made.stderr[-300:]])[0]}
    times = sorted(json.loads(made.stdout.strip().splitlines()[-1])["step_ms"])
    return {"status": "ok", "step_ms": times[len(times) // 2]}


def side(bench: Bench) -> None:
    """Measure the rows of a model in turn, several rounds in one sitting, in warm processes."""
    for model in MODELS:
        if not bench.store.has("search", model):
            print(f"side: no search of {model} yet", flush=True)
            continue
        with ExitStack() as stack:
            rows = _rows(bench, model, stack)
            for turn in range(ROUNDS):
                order = list(rows)
                order = order[turn % len(order) :] + order[: turn % len(order)]
                for row in order:
                    key = f"{model}/{row}/{turn}"
                    if bench.store.has("side", key) or bench.seconds_left() < 60:
                        continue
                    kept = rows[row](turn)
                    kept.pop("operators", None)
                    bench.store.add("side", key, model=model, row=row, turn=turn, **kept)
                    print(f"  {key}: {kept}", flush=True)


Row = Callable[[int], dict[str, Any]]


def _rows(bench: Bench, model: str, stack: ExitStack) -> dict[str, Row]:
    """What measures each row; a row's processes start with its first turn and stay."""
    opened: dict[str, Any] = {}

    def runner(name: str, make: Callable[[], Any]) -> Any:
        if name not in opened:
            opened[name] = stack.enter_context(make())
        return opened[name]

    def plan_row(make: Callable[[Soap], Plan]) -> Row:
        def measure(turn: int) -> dict[str, Any]:
            soap = runner("soap", lambda: bench.soap(model))
            return visit(soap, space.configuration_of(make(soap)), turn)

        return measure

    def ddp_row(factory: str, knobs: dict[str, Any]) -> Row:
        def measure(turn: int) -> dict[str, Any]:
            ddp = runner(f"{factory} {knobs}", lambda: bench.ddp(factory, knobs))
            return visit(ddp, dict(ddp.baseline), turn)

        return measure

    rows = {
        "plan: data parallel": plan_row(lambda r: data_parallel(r.inputs.graph, range(r.devices))),
        "plan: found": plan_row(lambda r: found_plan(bench, r, model)),
    }
    if model == "dlrm":
        tuned = next((r["knobs"] for r in bench.store.of("ddp") if r["key"] == "best"), {})
        rows["plan: two tables a device"] = plan_row(two_tables_each)
        rows["ddp: dense, as it comes"] = ddp_row("dlrm", {})
        rows["ddp: dense, tuned"] = ddp_row("dlrm", tuned)
        rows["ddp: sparse gradients"] = ddp_row("dlrm_sparse", {})
        rows["program: two tables a device"] = lambda turn: by_hand(bench)
    return rows


def by_operator(
    runner: Soap, plan: Plan, timed: dict[str, dict[str, float]]
) -> list[tuple[str, float, float]]:
    """Kind, simulated and measured milliseconds of each operator that was timed."""
    simulated, known = runner.simulator.by_operator(plan), runner.inputs.graph.by_name
    return [
        (known[name].kind, simulated[name].whole_ms, OperatorTime.from_json(times).whole_ms)
        for name, times in timed.items()
    ]


def drawn(bench: Bench) -> None:
    """Plans drawn by seed, simulated from the search's tables, and measured."""
    for model in MODELS:
        if not (bench.directory / f"search-{model}" / "soap" / "costs.json").exists():
            print(f"drawn: no tables of {model} yet", flush=True)
            continue
        todo = [n for n in range(DRAWN) if not bench.store.has("drawn", f"{model}/{n}")]
        if not todo or bench.seconds_left() < 60:
            continue
        with bench.soap(model) as runner:
            start = data_parallel(runner.inputs.graph, range(runner.devices))
            for number in todo:
                if bench.seconds_left() < 40:
                    return
                changes = DRIFTS[number % len(DRIFTS)]
                plan = runner.simulator.drift(start, changes, seed=number)
                simulated = runner.simulator.estimate(plan)
                kept = visit(runner, space.configuration_of(plan), number)
                operators = by_operator(runner, plan, kept.pop("operators", {}))
                bench.store.add(
                    "drawn", f"{model}/{number}", model=model, changes=changes,
                    simulated_ms=1e3 * simulated.seconds, simulated_gib=simulated.peak_gib,
                    calibrated=runner.inputs.machine.calibrated, operators=operators,
                    strategy=formats.dump_plan(runner.inputs.graph, plan, runner.devices), **kept,
                )  # fmt: skip
                print(f"  {model}/{number}: simulated {1e3 * simulated.seconds:.3f} ms, {kept}",
                      flush=True)  # fmt: skip


PARTS: dict[str, Callable[[Bench], None]] = {
    "ddp": tune_ddp,
    "search": searches,
    "side": side,
    "drawn": drawn,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "report"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--until-s", type=float, default=540.0, help="start nothing after that")
    parser.add_argument("--confirm-seconds", type=float, default=120.0, help="of each search")
    arguments = parser.parse_args()
    if "report" in arguments.parts:
        print(_soap_report.report(Store(arguments.store).records))
        return 0
    bench = Bench(arguments)
    bench.store.add("where", str(time.time()), **_soap_report.surroundings())
    for part in PARTS if "all" in arguments.parts else arguments.parts:
        if bench.seconds_left() > 30:
            print(f"== {part}", flush=True)
            PARTS[part](bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
