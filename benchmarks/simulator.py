"""How fast plans are simulated: proposals a second of the whole Markov chain, by model and devices.

    python benchmarks/simulator.py [--json] [--seconds 2] [--repeats 3]

Each case walks the chain as a search does: propose, work out transfers and memory, simulate,
accept or refuse. Rates are of wall time, the best of the repeats; with other work on the machine
``cpu`` says what the processor's own time came to. ``full`` simulates each proposal from its start
instead of by what it changes. Without the extra ``soap`` (numba) there is nothing to time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _soap_graphs as graphs
import numpy as np

from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import data_parallel
from perfsearch.soap.simulator import machine
from perfsearch.soap.simulator.chain import ChainOptions, Engine
from perfsearch.soap.simulator.problem import Problem

CASES = {
    "dlrm_4": ("dlrm", 4),
    "linear100_64": ("linear100", 64),
    "dlrm_8": ("dlrm", 8),
    "dlrm_64": ("dlrm", 64),
    "linear100_8": ("linear100", 8),
    "linear25_64": ("linear25", 64),
    "linear400_64": ("linear400", 64),
}
"""The first two are the ones with a target; the others show growth."""
PROBE = 200
"""Proposals by which a case's speed is guessed before it is timed."""


def graph_of(name: str) -> Graph:
    return graphs.dlrm() if name == "dlrm" else graphs.linears(int(name.removeprefix("linear")))


def engine_of(name: str, devices: int) -> tuple[Problem, Engine]:
    graph = graph_of(name)
    hardware = machine.uniform(
        devices, latency_us=15, gib_per_s=200, memory_gib=80, optimizer_us_per_mib=1.0
    )
    problem = Problem(graph, hardware, graphs.cost_of)
    engine = Engine(problem.tables, problem.curves, options=ChainOptions(alpha=1.0))
    engine.start(problem.numbers_of(data_parallel(graph, range(devices))))
    return problem, engine


def walked(engine: Engine, seconds: float, repeats: int) -> tuple[float, float]:
    """Proposals a second of wall and of processor time."""
    engine.run(PROBE)
    begin = time.perf_counter()
    engine.run(2 * PROBE)
    count = max(PROBE, int(PROBE * seconds / (time.perf_counter() - begin)))
    done, walls, cpus = 2 * PROBE, [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        engine.run(done + count)
        walls.append(count / (time.perf_counter() - wall))
        cpus.append(count / (time.process_time() - cpu))
        done += count
    return max(walls), max(cpus)


def full(problem: Problem, engine: Engine, seconds: float) -> float:
    """Plans a second, each simulated whole."""
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(20):
        places = range(len(problem.operators))
        plan = {
            problem.operators[p].name: problem.configurations(p)[
                int(generator.integers(len(problem.configurations(p))))
            ]
            for p in places
        }
        drawn.append(problem.numbers_of(plan))
    for numbers in drawn:
        engine.start(numbers)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        engine.start(drawn[count % len(drawn)])
        count += 1
    return count / (time.perf_counter() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a last line for machines")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each timing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    print(f"{'case':<14}{'operators':>10}{'devices':>8}{'configs':>9}{'proposals/s':>13}"
          f"{'cpu':>11}{'full':>9}")  # fmt: skip
    rates: dict[str, float] = {}
    for case in arguments.cases:
        name, devices = CASES[case]
        problem, engine = engine_of(name, devices)
        wall, cpu = walked(engine, arguments.seconds, arguments.repeats)
        whole = full(problem, engine, min(arguments.seconds, 1.0))
        rates[case] = round(wall)
        configs = sum(len(kind.numbers) for kind in problem.classes)
        print(f"{case:<14}{len(problem.operators):>10}{devices:>8}{configs:>9}{wall:>13,.0f}"
              f"{cpu:>11,.0f}{whole:>9,.0f}", flush=True)  # fmt: skip
    if arguments.json:
        print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
