"""What several starts of the chain of ``runner=soap`` are worth: four chains against one.

    python benchmarks/soap_starts.py [--proposals 200000] [--seeds 10] [--cases dlrm_16 ...]

Both have as many proposals in all, and are what a search runs: one chain begins with data
parallelism, four also with random plans and with the best that has a name. The best predicted step
in milliseconds by case: best, median and worst of the seeds, and the worst over the best that
either found. Nothing is timed, so that other work on the machine does not matter. Devices are on
nodes of eight, with slower links between these. Needs the extra ``soap`` (numba).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _soap_graphs as graphs
from simulator import graph_of

from perfsearch.core.hints import ChainRequest
from perfsearch.runners.soap.chains import run_chains
from perfsearch.soap.named import DATA_PARALLEL, OWN_BEST, named_plans
from perfsearch.soap.plan import Plan
from perfsearch.soap.simulator.machine import Machine, uniform
from perfsearch.soap.simulator.simulator import Simulator

CASES = {"dlrm_16": ("dlrm", 16), "linear25_16": ("linear25", 16), "dlrm_64": ("dlrm", 64)}
CHAINS = (1, 4)
NODE = 8


def machine_of(devices: int) -> Machine:
    """Nodes of eight devices, links of 200 GiB/s within and of 10 between them."""
    common = {"memory_gib": 80.0, "optimizer_us_per_mib": 1.0}
    near = uniform(devices, latency_us=15, gib_per_s=200, **common)
    far = uniform(devices, latency_us=40, gib_per_s=10, memory_gib=80.0)
    return replace(near, devices_per_node=NODE, across=far.within)


def job(case: str) -> tuple[Simulator, dict[str, Plan]]:
    """The simulator of a case and the plans that have a name."""
    name, devices = CASES[case]
    graph = graph_of(name)
    named = named_plans(graph, devices)
    simulator = Simulator(graph, machine_of(devices), graphs.cost_of, extra=tuple(named.values()))
    return simulator, {**named, OWN_BEST: simulator.problem.own_best()}


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--proposals", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    print("| case | plan or chains | best | median | worst | worst over best |")
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for case in arguments.cases:
        simulator, named = job(case)
        for name, plan in named.items():
            print(f"| {case} | {name} | {1e3 * simulator.estimate(plan).seconds:.4g} | | | |")
        found = {}
        for chains in CHAINS:
            found[chains] = [
                1e3 * best(simulator, named, arguments.proposals, seed, chains)
                for seed in range(arguments.seeds)
            ]
        least = min(min(times) for times in found.values())
        for chains, times in found.items():
            print(
                f"| {case} | {chains} chain{'s' if chains > 1 else ''} | {min(times):.4g} | "
                f"{statistics.median(times):.4g} | {max(times):.4g} | "
                f"{max(times) / least - 1:.1%} |",
                flush=True,
            )
    return 0


def best(
    simulator: Simulator, named: dict[str, Plan], proposals: int, seed: int, chains: int
) -> float:
    """Seconds of the best plan that chains find together."""
    request = ChainRequest({}, proposals, seed, chains=chains)
    found = run_chains(simulator, named[DATA_PARALLEL], named, request).found
    return found.plans[0][0]


if __name__ == "__main__":
    sys.exit(main())
