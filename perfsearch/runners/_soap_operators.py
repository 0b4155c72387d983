"""How well the simulator foretold single operators: a row a strategy and operator."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Status, Trial
from perfsearch.parallel.soap.configuration import OperatorConfiguration, Plan
from perfsearch.parallel.soap.graph import Graph, Operator
from perfsearch.parallel.soap.operator_time import OperatorTime

HEADER = (
    "trials",
    "operator",
    "kind",
    "dims",
    "devices",
    "simulated_forward_ms",
    "measured_forward_ms",
    "simulated_backward_ms",
    "measured_backward_ms",
    "simulated_communication_ms",
    "measured_communication_ms",
    "simulated_ms",
    "measured_ms",
    "error",
    "simulated_overhead_ms",
)
WORST = 3
"""Operators that are named at the end of a search."""


@dataclass(frozen=True)
class OperatorCompared:
    """One operator of a strategy that was run.

    Attributes:
        trials: of the strategy, in which it was timed.
        operator: which.
        configuration: its degrees and devices.
        simulated: what the simulator says.
        measured: the median of the trials.
        overhead_ms: what the simulator adds to it, beside its own times, so that whole steps come
            out right; it was calibrated by a step, not by operators, and none of it was timed.

    """

    trials: tuple[int, ...]
    operator: Operator
    configuration: OperatorConfiguration
    simulated: OperatorTime
    measured: OperatorTime
    overhead_ms: float = 0.0

    @property
    def off_ms(self) -> float:
        """By how much the simulated time is too long."""
        return self.simulated.whole_ms - self.measured.whole_ms

    @property
    def error(self) -> float | None:
        """The same as a share of the measured time; ``None`` where nothing was measured."""
        return self.off_ms / self.measured.whole_ms if self.measured.whole_ms > 0 else None


def compare(
    trials: Sequence[Trial],
    graph: Graph,
    plan_of: Callable[[Configuration], Plan],
    simulate: Callable[[Plan], Mapping[str, OperatorTime]],
    overhead_ms: float = 0.0,
) -> list[OperatorCompared]:
    """Every operator of each strategy in whose trials operators were timed.

    Args:
        trials: of the search.
        graph: of the job.
        plan_of: the whole plan of a configuration.
        simulate: what a plan's operators take.
        overhead_ms: of each operator, beside that.

    """
    by_key: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.status is Status.OK and _times(trial):
            by_key.setdefault(key_of(trial.configuration), []).append(trial)
    found = []
    for same in by_key.values():
        plan = plan_of(same[0].configuration)
        simulated, numbers = simulate(plan), tuple(trial.number for trial in same)
        for operator in graph.planned:
            timed = [t[operator.name] for t in map(_times, same) if operator.name in t]
            if timed:
                found.append(
                    OperatorCompared(
                        numbers,
                        operator,
                        plan[operator.name],
                        simulated[operator.name],
                        _median(timed),
                        overhead_ms,
                    )
                )
    return found


def _times(trial: Trial) -> dict[str, OperatorTime]:
    if trial.measurement is None:
        return {}
    told = trial.measurement.environment.get("operators", {})
    return {name: OperatorTime.from_json(record) for name, record in told.items()}


def _median(times: Sequence[OperatorTime]) -> OperatorTime:
    return OperatorTime(*map(statistics.median, zip(*map(astuple, times), strict=True)))


def write_csv(compared: Iterable[OperatorCompared], path: Path) -> None:
    """A row an operator of an executed strategy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(map(_cells, compared))


def _cells(row: OperatorCompared) -> list[str]:
    pairs = zip(astuple(row.simulated), astuple(row.measured), strict=True)
    times = [number for pair in pairs for number in pair]
    times += [row.simulated.whole_ms, row.measured.whole_ms]
    return [
        " ".join(map(str, row.trials)),
        row.operator.name,
        row.operator.kind,
        "x".join(map(str, row.configuration.degrees)),
        " ".join(map(str, row.configuration.devices)),
        *(f"{number:.6g}" for number in times),
        "" if row.error is None else f"{row.error:.4f}",
        f"{row.overhead_ms:.6g}",
    ]


def worst_lines(compared: Sequence[OperatorCompared]) -> list[str]:
    """The operators of a strategy that are furthest off, in milliseconds of a step."""
    worst = sorted(compared, key=lambda row: -abs(row.off_ms))[:WORST]
    if not worst:
        return []
    return ["operators furthest from what was simulated, in ms:", *map(_line, worst)]


def _line(row: OperatorCompared) -> str:
    names = ("forward", "backward", "communication")
    pairs = zip(names, astuple(row.simulated), astuple(row.measured), strict=True)
    parts = ", ".join(f"{name} {a:.3f} for {b:.3f}" for name, a, b in pairs)
    error = "" if row.error is None else f" ({100 * row.error:+.0f}%)"
    whole = f"simulated {row.simulated.whole_ms:.3f} for {row.measured.whole_ms:.3f} measured"
    return f"  [{row.operator.name}] {whole}{error}: {parts}"
