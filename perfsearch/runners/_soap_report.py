"""What is printed and written of plans: tables, timelines, simulated against measured times."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Status, Trial
from perfsearch.parallel.soap import flexflow_format, strategy_file
from perfsearch.parallel.soap.configuration import Plan, PlanError
from perfsearch.parallel.soap.graph import Graph
from perfsearch.parallel.soap.timeline import busy_lines, chrome_trace

if TYPE_CHECKING:
    from perfsearch.parallel.soap.simulator import Estimate, Found, Simulator

_SMALL_GIB = 0.1


def import_plan(path: Path, graph: Graph, devices: int) -> Plan:
    """Read a strategy, ours or FlexFlow's.

    Raises:
        PlanError: it is neither, or does not fit; the operator is named.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot be read as text: {error}") from error
    if flexflow_format.is_flexflow(text):
        return flexflow_format.parse(text, graph, devices)
    return strategy_file.parse(text, graph, devices)


def walk_line(found: Found, host_us: float = 0.0) -> str:
    """How a search in the simulator went; ``host_us`` is the least that a step takes anyway."""
    best = f", best {1e3 * found.plans[0][0]:.4g} ms" if found.plans else ", none fits"
    if found.plans and host_us > 1e6 * found.plans[0][0]:
        best += f" of the devices, where loading and launching take {host_us / 1e3:.4g} ms"
    return (
        f"simulated {found.proposals} proposals in {found.seconds:.2f} s "
        f"({found.proposals_per_s:,.0f}/s), {found.accepted} accepted, "
        f"{found.infeasible} beyond memory{best}"
    )


def simulation(simulator: Simulator, plan: Plan) -> list[str]:
    """What is expected of a plan, line by line."""
    found = simulator.estimate(plan)
    devices = simulator.problem.machine.devices
    small = max(found.memory_gib) < _SMALL_GIB
    memory = ", ".join(f"{gib * (1024 if small else 1):.4g}" for gib in found.memory_gib)
    fits = "" if found.fits else ": more than there is"
    return [
        *strategy_file.table(simulator.problem.graph, plan),
        f"predicted step {1e3 * found.seconds:.4g} ms",
        f"predicted memory by device, {'MiB' if small else 'GiB'}: {memory} "
        f"(of {size(simulator.problem.machine.memory_gib)}){fits}",
        *busy_lines(simulator.timeline(plan), devices),
    ]


def found_lines(simulator: Simulator, found: Found, start: Plan) -> list[str]:
    """What a search in the simulator alone came to."""
    lines = [
        f"iter({n}) cur({1e3 * current:.4g}) next({1e3 * proposed:.4g}) best({1e3 * best:.4g})"
        for n, current, proposed, best in found.series[:: max(1, len(found.series) // 20)]
    ]
    lines.append(walk_line(found))
    if not found.plans:
        return [*lines, nothing_fits(simulator, start)]
    before = simulator.estimate(start).seconds
    plan = found.plans[0][1]
    seconds = simulator.estimate(plan).seconds  # the search may have gone by the devices alone
    lines += simulation(simulator, plan)
    return [*lines, f"predicted gain over the start: {before / seconds:.3f}x, not measured"]


def size(gib: float) -> str:
    """Memory in MiB where GiB would round it away."""
    return f"{gib:.2f} GiB" if gib >= _SMALL_GIB else f"{1024 * gib:.4g} MiB"


def nothing_fits(simulator: Simulator, start: Plan) -> str:
    """By how much a search in the simulator lacked memory."""
    held, needed = simulator.problem.machine.memory_gib, simulator.estimate(start).peak_gib
    return (
        f"no plan that was tried fits the {size(held)} of a device; the one to start from needs "
        f"{size(needed)} on one. More devices or a smaller workload.global_batch need less"
    )


def write_timeline(simulator: Simulator, plan: Plan, path: Path) -> None:
    """Write the simulated step as a Chrome trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(simulator.timeline(plan))))


@dataclass(frozen=True)
class Compared:
    """A strategy's simulated and measured step."""

    trials: tuple[int, ...]
    simulated_ms: float
    measured_ms: float
    simulated_gib: float
    measured_gib: float | None

    @property
    def error(self) -> float:
        """Share of the measured time by which the simulated one is off."""
        return self.simulated_ms / self.measured_ms - 1


def compare(
    trials: Sequence[Trial], estimate: Callable[[Configuration], Estimate]
) -> list[Compared]:
    """Each executed strategy once, the median of its trials."""
    by_key: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.status is Status.OK and trial.measurement is not None:
            by_key.setdefault(key_of(trial.configuration), []).append(trial)
    found = []
    for same in by_key.values():
        expected = estimate(same[0].configuration)
        measured = [t.measurement for t in same if t.measurement is not None]
        peaks = [m.peak_allocated_gib for m in measured if m.peak_allocated_gib is not None]
        found.append(
            Compared(
                tuple(t.number for t in same),
                1e3 * expected.seconds,
                1e3 * statistics.median(m.step_time_s for m in measured),
                expected.peak_gib,
                statistics.median(peaks) if peaks else None,
            )
        )
    return found


def accuracy_lines(compared: Sequence[Compared]) -> list[str]:
    """How well the simulator foretold what was measured, the baseline aside.

    Its step is what the machine was fitted to.
    """
    errors = [abs(c.error) for c in compared if 0 not in c.trials]
    if not errors:
        return []
    return [
        f"simulated against measured step of {len(errors)} "
        f"{'strategy' if len(errors) == 1 else 'strategies'} beside the baseline: median error "
        f"{100 * statistics.median(errors):.1f}%, worst {100 * max(errors):.1f}%"
    ]


def write_csv(compared: Sequence[Compared], path: Path) -> None:
    """A row an executed strategy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["trials", "simulated_ms", "measured_ms", "error", "simulated_gib", "measured_gib"]
        )
        for row in compared:
            writer.writerow(
                [
                    " ".join(map(str, row.trials)),
                    f"{row.simulated_ms:.6g}",
                    f"{row.measured_ms:.6g}",
                    f"{row.error:.4f}",
                    f"{row.simulated_gib:.6g}",
                    "" if row.measured_gib is None else f"{row.measured_gib:.6g}",
                ]
            )
