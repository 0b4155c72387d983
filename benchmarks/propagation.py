"""What carrying configurations over to neighbours gains in the chain of ``runner=soap``.

    python benchmarks/propagation.py [--seeds 7] [--cases dlrm_4 ...]

Each chain starts from data parallelism and walks as a search does (alpha 1, back to the best a
hundred times); the best predicted step is shown after each number of proposals, as a share of data
parallelism's, median and worst over the seeds. Nothing is timed, so that other work on the machine
does not matter. Needs the extra ``soap`` (numba).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import _soap_graphs as graphs
from simulator import CASES, graph_of

from perfsearch.soap.plan import data_parallel
from perfsearch.soap.simulator import machine
from perfsearch.soap.simulator import memory as at
from perfsearch.soap.simulator.chain import ChainOptions, Engine
from perfsearch.soap.simulator.problem import Problem

SHARES = (0.0, 0.1, 0.25, 0.5)
MARKS = (2_000, 10_000, 50_000)
"""Numbers of proposals after which the best is read."""
DEFAULT_CASES = ("dlrm_4", "dlrm_8", "linear25_64", "linear100_8")


def problem_of(case: str) -> tuple[Problem, list[int]]:
    """The operators of a case on its devices, and data parallelism as a start."""
    name, devices = CASES[case]
    graph = graph_of(name)
    hardware = machine.uniform(
        devices, latency_us=15, gib_per_s=200, memory_gib=80, optimizer_us_per_mib=1.0
    )
    problem = Problem(graph, hardware, graphs.cost_of)
    return problem, problem.numbers_of(data_parallel(graph, range(devices)))


def best_after(problem: Problem, start: list[int], share: float, seed: int) -> list[float]:
    """Best predicted step at each mark, relative to the start's."""
    options = ChainOptions(alpha=1.0, carry=share, return_every=MARKS[-1] // 100)
    engine = Engine(problem.tables, problem.curves, seed, options)
    first = engine.start(start)
    found = []
    for mark in MARKS:
        engine.run(mark)
        found.append(engine[at.BEST_COST] / first)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--cases", nargs="*", default=list(DEFAULT_CASES), choices=list(CASES))
    arguments = parser.parse_args()
    head = "".join(f"{f'{mark:,}':>18}" for mark in MARKS)
    print(f"{'case':<14}{'share':>6}{head}   best step, % of data parallelism: median (worst)")
    for case in arguments.cases:
        problem, start = problem_of(case)
        for share in SHARES:
            runs = [best_after(problem, start, share, seed) for seed in range(arguments.seeds)]
            cells = ""
            for column in zip(*runs, strict=True):
                cells += f"{100 * statistics.median(column):>10.2f} ({100 * max(column):.2f})"
            print(f"{case:<14}{share:>6g}{cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
