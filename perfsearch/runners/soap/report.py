"""What is printed and written of plans: tables, timelines, simulated against measured times."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.core.knob import Configuration
from perfsearch.core.space import key_of
from perfsearch.core.trial import Status, Trial
from perfsearch.runners.soap import space
from perfsearch.soap import formats
from perfsearch.soap.graph import Graph, Operator, described
from perfsearch.soap.picture import picture
from perfsearch.soap.plan import OperatorConfiguration, OperatorTime, Plan, left_on_one_device
from perfsearch.soap.simulator.timeline import MEASURED, Task, busy_lines, chrome_trace

if TYPE_CHECKING:
    from perfsearch.runners.soap.chains import Searched
    from perfsearch.runners.soap.job import InputTables
    from perfsearch.soap.simulator.simulator import Estimate, Simulator

_SMALL_GIB = 0.1


MOST_LEFT = 0.05
"""Share of the FLOPs on one device from which on a baseline is not called data parallelism."""


def baseline_line(graph: Graph, devices: int) -> str | None:
    """What data parallelism leaves whole on one device; ``None``: next to nothing."""
    left = left_on_one_device(graph)
    if devices < 2 or left.share < 0.0005:
        return None
    named = ", ".join(
        f"{share:.1%} from {described(operator)} on" for operator, share in left.causes[:3]
    )
    more = len(left.causes) - 3
    named += f" and {more} more" if more > 0 else ""
    if left.share < MOST_LEFT:
        return (
            f"the baseline is data parallelism but for {left.share:.1%} of the forward FLOPs, "
            f"which run whole on device 0: {named}"
        )
    return (
        f"the baseline is not data parallelism: {left.share:.1%} of the forward FLOPs run whole on "
        f"device 0: {named}. A gain over it is none over DistributedDataParallel, whose step, that "
        "of runner=ddp, the closing table has"
    )


MOST_SCATTER = 0.2
"""Of repeated measurements; a plan is often predicted to be faster by less."""


def scatter_line(inputs: InputTables) -> str | None:
    """That times of parts are no ground to plan on; ``None``: they are."""
    scatter = inputs.scatter()
    if scatter <= MOST_SCATTER:
        return None
    return (
        f"times of parts scatter by {scatter:.0%} when repeated: something else uses the devices. "
        "Do not trust a plan by them, however much faster it is simulated; close what runs beside, "
        f"remove the costs in runner.cache, and measure again ({scatter:.0%} is the range between "
        f"quartiles over the median; up to {MOST_SCATTER:.0%} is usual)"
    )


def chain_line(searched: Searched, host_us: float = 0.0) -> str:
    """How a search in the simulator went; ``host_us`` is the least that a step takes anyway."""
    found = searched.found
    starts = ", ".join(searched.starts)
    best = f", best {1e3 * found.plans[0][0]:.4g} ms" if found.plans else ", none fits"
    if found.plans and host_us > 1e6 * found.plans[0][0]:
        best += f" of the devices, where loading and launching take {host_us / 1e3:.4g} ms"
    return (
        f"simulated {found.proposals} proposals in {found.seconds:.2f} s "
        f"({found.proposals_per_s:,.0f}/s) from {starts}; {found.accepted} accepted, "
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
        *formats.plan_table(simulator.problem.graph, plan),
        f"predicted step {1e3 * found.seconds:.4g} ms",
        f"predicted memory by device, {'MiB' if small else 'GiB'}: {memory} "
        f"(of {size(simulator.problem.machine.memory_gib)}){fits}",
        *busy_lines(simulator.timeline(plan), devices),
    ]


def found_lines(simulator: Simulator, searched: Searched, start: Plan) -> list[str]:
    """What a search in the simulator alone came to."""
    found = searched.found
    lines = [
        f"iter({n}) cur({1e3 * current:.4g}) next({1e3 * proposed:.4g}) best({1e3 * best:.4g})"
        for n, current, proposed, best in found.series[:: max(1, len(found.series) // 20)]
    ]
    lines.append(chain_line(searched))
    if not found.plans:
        return [*lines, nothing_fits(simulator, start)]
    before = simulator.estimate(start).seconds
    plan = found.plans[0][1]
    seconds = simulator.estimate(plan).seconds  # the search may have gone by the devices alone
    lines += simulation(simulator, plan)
    return [*lines, f"predicted gain over the start: {before / seconds - 1:+.1%}, not measured"]


@dataclass(frozen=True)
class PlanRow:
    """A plan among others.

    Attributes:
        name: what it is called.
        estimate: what is expected of it; ``None``: it is none that the simulator knows.
        measured_ms: its step, where it was run.
        remark: what else there is to say.

    """

    name: str
    estimate: Estimate | None
    measured_ms: float | None = None
    remark: str = ""


def plan_rows(rows: Sequence[PlanRow]) -> list[str]:
    """Plans side by side."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'plan':<{width}}  {'simulated ms':>12}  {'of one device':>13}  {'measured ms':>11}"]
    for row in rows:
        simulated = memory = measured = remark = ""
        if row.estimate is not None:
            simulated = f"{1e3 * row.estimate.seconds:.4g}"
            memory = size(row.estimate.peak_gib)
            remark = "" if row.estimate.fits else "  more memory than there is"
        if row.measured_ms is not None:
            measured = f"{row.measured_ms:.4g}"
        remark = f"  {row.remark}" if row.remark else remark
        line = f"{row.name:<{width}}  {simulated:>12}  {memory:>13}  {measured:>11}{remark}"
        lines.append(line.rstrip())
    return lines


DDP = "ddp"
"""In what a baseline's trial notes: the step of DistributedDataParallel, run right after it."""


def ddp_rows(trials: Sequence[Trial]) -> list[PlanRow]:
    """DistributedDataParallel's own step, where one was run."""
    notes = [t.measurement.environment.get(DDP) for t in trials if t.measurement is not None]
    for note in notes:
        if note:
            failed = note.get("failed", "")
            step_ms = note.get("step_ms")
            remark = f"failed: {failed}" if failed else "as runner=ddp runs it, no plan of this"
            return [PlanRow("DistributedDataParallel", None, step_ms, remark)]
    return []


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


# -----------------------------------------------------------------------------
# Files of a plan.


def write_strategy(
    simulator: Simulator,
    plan: Plan,
    devices: int,
    export_to: str | None,
    dtensor: str | None,
    measured: Sequence[Task],
    directory: Path,
) -> list[Path]:
    """The strategy as YAML and, where that can say it, as FlexFlow's text; a picture, a timeline,
    DTensor's module.

    Args:
        simulator: of the job.
        plan: to write.
        devices: of the machine.
        export_to: another place that the user wants the YAML in.
        dtensor: the module for DTensor, where it was seen to train the same.
        measured: tasks of a step of it, where it was timed.
        directory: made where it is missing.

    """
    directory.mkdir(parents=True, exist_ok=True)
    graph = simulator.problem.graph
    text = formats.dump_plan(graph, plan, devices)
    written = [directory / "strategy.yaml", *([] if export_to is None else [Path(export_to)])]
    for path in written:
        path.write_text(text)
    if all(chosen.sums == 1 for chosen in plan.values()):
        written.append(directory / "flexflow.txt")
        written[-1].write_text(formats.dump_flexflow(graph, plan))
    drawn = directory / "plan.svg"
    drawn.write_text(picture(graph, plan, devices))
    timeline = directory / "timeline.json"
    write_timeline(simulator, plan, timeline, measured)
    written += [drawn, timeline]
    if dtensor is not None:
        (directory / "dtensor_plan.py").write_text(dtensor)
        written.append(directory / "dtensor_plan.py")
    return written


def write_tables(
    compared: Sequence[Compared],
    operators: Sequence[OperatorCompared],
    directory: Path,
) -> list[Path]:
    """Simulated against measured times, by strategy and by operator."""
    whole = directory / "simulated_against_measured.csv"
    write_csv(compared, whole)
    parts = directory / "simulated_against_measured_by_operator.csv"
    write_operators_csv(operators, parts)
    return [whole, parts]


def measured_tasks(trials: Sequence[Trial]) -> list[Task]:
    """What was timed of a plan's step, in the last of its trials that was."""
    for trial in reversed(trials):
        spans = trial.measurement.environment.get("spans") if trial.measurement else None
        if spans:
            return [
                Task(MEASURED[column], name, device, begin_us, end_us)
                for device, name, column, begin_us, end_us in spans
            ]
    return []


def write_timeline(
    simulator: Simulator, plan: Plan, path: Path, measured: Sequence[Task] = ()
) -> None:
    """Write the simulated step as a Chrome trace, beside it what was timed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(simulator.timeline(plan), measured)))


# -----------------------------------------------------------------------------
# Simulated against measured steps: a row a plan.


@dataclass(frozen=True)
class Compared:
    """A strategy's simulated and measured step."""

    configuration: Configuration
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
                same[0].configuration,
                tuple(t.number for t in same),
                1e3 * expected.seconds,
                1e3 * statistics.median(m.step_time_s for m in measured),
                expected.peak_gib,
                statistics.median(peaks) if peaks else None,
            )
        )
    return found


def accuracy_lines(compared: Sequence[Compared]) -> list[str]:
    """How well the simulator predicted what was measured, the baseline aside.

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


# -----------------------------------------------------------------------------
# Simulated against measured operators: a row a plan and operator.

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


def compare_operators(
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


def write_operators_csv(compared: Iterable[OperatorCompared], path: Path) -> None:
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
        space.plan_to_knob(row.configuration).partition("@")[0],
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
