"""A described job: graph, machine and costs, the simulator over them, and what is searched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.config.options import show
from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.runners.soap import space
from perfsearch.soap import formats
from perfsearch.soap.formats import COSTS, GRAPH, MACHINE
from perfsearch.soap.graph import Graph, Role, coverage, dump_graph, parse_graph
from perfsearch.soap.named import DATA_PARALLEL, OWN_BEST, named_plans, within
from perfsearch.soap.parts import gradients
from perfsearch.soap.plan import Plan, PlanError
from perfsearch.soap.simulator.machine import CostTable, Machine, ShardCost, cost_file
from perfsearch.workloads.spec import AUTO, TRAITS, WorkloadSpec

if TYPE_CHECKING:
    from perfsearch.runners.soap.runner import Soap
    from perfsearch.soap.simulator.problem import CostOf  # needs the extra ``soap``
    from perfsearch.soap.simulator.simulator import Simulator


class Job:
    """What a search over per-operator parallelisation knows before and while it runs.

    Args:
        inputs: graph, machine and costs, as they were measured or read.
        options: the ``runner.*`` keys.
        devices: how many to plan for.

    Attributes:
        inputs: the same, its memory limited by the options; replaced by ``calibrate``.
        simulator: predicts plans; made anew by ``calibrate``.
        coverage: which operators have a rule.
        searched: knobs that are not pinned.
        pinned: the others' values.
        baseline: data parallelism, of the searched knobs.
        start: where the search begins, if not there.
        named: plans to compare with and to start from, by what they are called; the baseline first.

    Raises:
        BadInputError: too little of the model can be planned, or a file does not fit it.

    """

    def __init__(self, inputs: InputTables, options: Soap.Options, devices: int) -> None:
        self._options = options
        self._devices = devices
        self.inputs = with_memory_limit(inputs, options.device_memory_gib)
        graph = self.inputs.graph
        if not graph.planned:
            raise BadInputError(
                "runner=soap: nothing to parallelise: the loss is computed from the batch alone, "
                "by no operator that has a parameter before it. Give a model that trains some"
            )
        self.coverage = coverage(graph, self.inputs.forward_us())
        refusal = self.coverage.refusal(options.min_coverage)
        if refusal is not None:
            raise BadInputError(f"runner.min_coverage={options.min_coverage:g}: {refusal}")
        named = named_plans(graph, devices, roles_of(options.split))
        start = named[DATA_PARALLEL]
        imported = self._imported()
        asked = space.by_operator(options.knobs)
        self._allowed = space.allowed_configurations(graph, start, asked, devices)
        self.named = {name: within(plan, self._allowed, start) for name, plan in named.items()}
        self._extra = (*named.values(), *(() if imported is None else (imported,)))
        self.simulator = self._simulator(self.inputs.machine)
        self.named[OWN_BEST] = self.simulator.problem.own_best()
        self.searched, self.pinned = space.knobs(self.simulator.problem, start, asked)
        self.baseline: dict[str, Value] = {knob.name: knob.default for knob in self.searched}
        self.start: dict[str, Value] | None = None
        if imported is not None:
            whole = space.configuration_of(imported)
            self.start = {name: whole[name] for name in self.baseline}

    @property
    def replays(self) -> bool:
        """Whether steps are replayed, so that launching costs the host nothing."""
        return self._options.cuda_graph and self.inputs.machine.can_replay

    def plan(self, configuration: Configuration) -> Plan:
        """The plan of a configuration of the space."""
        return space.plan_of({**self.pinned, **configuration})

    def searched_of(self, plan: Plan) -> dict[str, Value]:
        """The configuration of a plan; operators that are pinned are left out."""
        whole = space.configuration_of(plan)
        return {name: whole[name] for name in self.baseline}

    @property
    def first_plan(self) -> Plan:
        """Where a search begins."""
        return self.plan({**self.baseline, **(self.start or {})})

    def calibrate(self, trials: Sequence[Trial], directory: Path) -> None:
        """Let the measured baseline say what steps and tasks take beside what was timed.

        The result is kept with the search's tables, so that the chain can be run again without it.

        Args:
            trials: of the search; without a baseline that ran nothing is done.
            directory: of the search's tables.

        """
        baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
        machine = self.inputs.machine
        if machine.calibrated or baseline is None or baseline.status is not Status.OK:
            return
        assert baseline.measurement is not None
        machine = calibrated(
            machine, baseline.measurement, self.plan(self.baseline), self._simulator
        )
        self.inputs = replace(self.inputs, machine=machine)
        machine.write(directory / MACHINE)
        self.simulator = self._simulator(machine)

    @property
    def chain_simulator(self) -> Simulator:
        """What a chain runs in: where hosts that replay decide, all plans are equal to them, so
        that it goes by the devices alone.
        """
        if self.replays and self.inputs.machine.host_us > 0:
            return self._simulator(replace(self.inputs.machine, host_us=0.0))
        return self.simulator

    def _simulator(self, machine: Machine) -> Simulator:
        from perfsearch.soap.simulator.simulator import Simulator

        if self.replays:
            machine = replace(machine, transfer_host_us=0.0, sync_host_us=0.0)
        return Simulator(
            self.inputs.graph,
            machine,
            self.inputs.cost_of(self.replays),
            roles_of(self._options.split),
            self._extra,
            self._allowed,
        )

    def _imported(self) -> Plan | None:
        path = self._options.import_from
        if path is None:
            return None
        try:
            return formats.read_plan(Path(path), self.inputs.graph, self._devices)
        except PlanError as error:
            raise BadInputError(f"runner.import_from={path}: {error}") from error


# -----------------------------------------------------------------------------
# The input tables that plans are simulated from: graph, machine and costs; measured or read.

Measure = Callable[[Path, list[str], Path | None], None]
"""Leaves the three files in a directory, without the costs of these keys; of the machine of
a file, where there is one, only what the job's optimizer adds is measured."""


@dataclass(frozen=True)
class InputTables:
    """Graph, machine and costs, ready to plan with, and the job that they are of."""

    graph: Graph
    machine: Machine
    costs: CostTable
    job: JobKey

    def write(self, directory: Path) -> None:
        """Leave them in a directory from which they can be read again."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / GRAPH).write_text(dump_graph(self.graph))
        self.machine.write(directory / MACHINE)
        self.costs.write(directory / COSTS)
        self.job.write(directory)

    def forward_us(self) -> dict[str, float]:
        """Of each operator that a plan configures, how long its forward pass takes, whole."""
        graph = self.graph
        return {
            o.name: self.costs.cost_of(o, o.whole, gradients(graph, o)).forward_us
            for o in graph.planned
        }

    def scatter(self) -> float:
        """By how much repeated measurements of whole operators scatter: the range between quartiles
        as a share of the median, weighted by their forward times.
        """
        graph = self.graph
        costs = [self.costs.cost_of(o, o.whole, gradients(graph, o)) for o in graph.planned]
        whole_us = sum(cost.forward_us for cost in costs)
        return sum(c.spread * c.forward_us for c in costs) / whole_us if whole_us > 0 else 0.0

    def cost_of(self, launches_are_free: bool) -> CostOf:
        """Times of parts; without those of the host where launches are replayed."""
        if not launches_are_free:
            return self.costs.cost_of

        def cost(operator, part, wanted):  # type: ignore[no-untyped-def]
            found = self.costs.cost_of(operator, part, wanted)
            return ShardCost(found.forward_us, found.backward_us)

        return cost


def read_tables(directory: Path) -> InputTables:
    """Read what ``InputTables.write`` wrote, or edited copies.

    Raises:
        BadInputError: a file is missing or cannot be used.

    """
    try:
        graph = parse_graph((directory / GRAPH).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{directory / GRAPH}: not a captured graph: {error}") from error
    machine, table = Machine.read(directory / MACHINE), CostTable.read(directory / COSTS)
    return InputTables(graph, machine, table, JobKey.read(directory, graph))


def measured_tables(
    directory: Path,
    cache: Path,
    device: str,
    torch: str,
    devices: int,
    job: JobKey,
    measure: Measure,
    nodes: int = 1,
) -> InputTables:
    """Measure what is not known yet of this kind of device.

    Args:
        directory: for the files of this search; used as they are where they are complete, which
            the job's name, written last, says.
        cache: for what other searches can use.
        device: name of the devices.
        torch: version.
        devices: number of them.
        job: that is measured.
        measure: does it.
        nodes: that the devices are on.

    """
    if all((directory / name).exists() for name in (GRAPH, MACHINE, COSTS, JOB)):
        return read_tables(directory)
    known_costs = cost_file(cache, device, torch)
    where = f"x{devices}" if nodes == 1 else f"x{devices}-on-{nodes}-nodes"
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"machine-{device}-{where}-torch-{torch}.json")
    known = CostTable.read(known_costs) if known_costs.exists() else CostTable(device, torch)
    known_machine = cache / name
    measure(directory, list(known.entries), known_machine if known_machine.exists() else None)
    if not known_machine.exists():
        Machine.read(directory / MACHINE).write(known_machine)
    known.merge(CostTable.read(directory / COSTS))
    known.write(known_costs)
    known.write(directory / COSTS)
    job.write(directory)
    return read_tables(directory)


def with_memory_limit(inputs: InputTables, memory_gib: float | None) -> InputTables:
    """The same with less memory a device, where that is wanted."""
    if memory_gib is None:
        return inputs
    return replace(inputs, machine=replace(inputs.machine, memory_gib=memory_gib))


def roles_of(names: tuple[str, ...]) -> frozenset[Role]:
    """The kinds of dimensions that may be split.

    Raises:
        ValueError: a name is none of them.

    """
    allowed = [str(role) for role in Role]
    for name in names:
        if name not in allowed:
            raise ValueError(f"runner.split={list(names)}: {name} is none of {', '.join(allowed)}")
    return frozenset(Role(name) for name in names)


# -----------------------------------------------------------------------------
# The cache key of input tables: which job they are of, so that they are taken for no other one's.

JOB = "job.json"
SCHEMA = 1

_BUILT_IN = re.compile(r"perfsearch[/\\]workloads[/\\](\w+)\.py:\d+$")
_ANYWHERE = re.compile(r"\.py:\d+$")


@dataclass(frozen=True)
class JobKey:
    """Cache key of input tables: the job that they were measured for.

    Attributes:
        name: of the workload; empty where tables do not say.
        global_batch: samples of a step over all devices.
        size: of the workload; empty where tables do not say.
        factory: of a custom workload; ``None`` also where tables do not say.
        options: keys of the workload alone, those left to its size apart; ``None`` where tables do
            not say.

    """

    name: str
    global_batch: int
    size: str = ""
    factory: str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, workload: WorkloadSpec) -> JobKey:
        """The key of a workload, once its size and batch are settled."""
        assert workload.global_batch is not None
        options = _own_options(workload)
        return cls(workload.name, workload.global_batch, workload.size, workload.factory, options)

    @classmethod
    def read(cls, directory: Path, graph: Graph) -> JobKey:
        """The key of a directory, as far as it says; where its model was written, otherwise.

        Raises:
            BadInputError: the file cannot be used.

        """
        path = directory / JOB
        if not path.exists():
            return _of_graph(graph)
        try:
            record = json.loads(path.read_text())
            if record.pop("schema") != SCHEMA:
                raise ValueError(f"schema {SCHEMA} is needed")
            found = cls(**record)
            if not isinstance(found.name, str) or not isinstance(found.options, dict | None):
                raise TypeError("name is text, options are keys and values")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(
                f"{path}: not the name of a job: {error}. Remove the file to go by the graph alone"
            ) from error
        if found.global_batch != graph.batch:
            raise BadInputError(
                f"{path}: global_batch={found.global_batch}, and the graph beside it is of "
                f"{graph.batch} samples: they belong to different jobs"
            )
        return found

    def write(self, directory: Path) -> None:
        """Leave it beside the tables."""
        (directory / JOB).write_text(json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n")

    def __str__(self) -> str:
        words = ["model", self.name, self.size if self.size != self.name else "", self.factory]
        words += [f"{name}={show(value)}" for name, value in (self.options or {}).items()]
        return f"{' '.join(filter(None, words))} of global batch {self.global_batch}"

    def require(self, asked: WorkloadSpec, tables: str) -> None:
        """Refuse another job than this.

        Args:
            asked: the workload, as far as it is settled.
            tables: where this one comes from.

        Raises:
            BadInputError: naming the first key that differs.

        """
        different = next(self._differences(asked), None)
        if different is not None:
            raise BadInputError(
                f"{different}: runner.tables={tables} are of {self}. Leave workload.* out to plan "
                "for that (a search needs the same workload), or measure without runner.tables"
            )

    def _differences(self, asked: WorkloadSpec) -> Iterator[str]:
        if self.name and asked.name != self.name:
            yield f"workload={asked.name}"
        if self.size and asked.size not in (AUTO, self.size):
            yield f"workload.size={asked.size}"
        if self.options is not None:
            if asked.factory != self.factory:
                yield f"workload.factory={show(asked.factory)}"
            own = _own_options(asked)
            for name in sorted({*own, *self.options}):
                if own.get(name) != self.options.get(name):
                    yield f"workload.{name}={show(own.get(name))}"
        if asked.global_batch not in (None, self.global_batch):
            yield f"workload.global_batch={asked.global_batch}"


def differs_from_default(workload: WorkloadSpec) -> bool:
    """Whether any ``workload.*`` key is another one than where nothing is asked for."""
    return replace(workload, options=_own_options(workload)) != WorkloadSpec()


def _own_options(workload: WorkloadSpec) -> dict[str, Any]:
    """What makes another model; of a custom workload only its factory does."""
    if workload.name == "custom":
        return {}
    return {name: value for name, value in workload.options.items() if value is not None}


def _of_graph(graph: Graph) -> JobKey:
    """By the files that the model's operators were written in."""
    sources = [operator.source for operator in graph.planned]
    built_in = [match.group(1) for source in sources if (match := _BUILT_IN.search(source))]
    if built_in and built_in[0] in TRAITS:
        return JobKey(built_in[0], graph.batch)
    return JobKey("custom" if any(map(_ANYWHERE.search, sources)) else "", graph.batch)


# -----------------------------------------------------------------------------
# Input tables from ``runner.tables``, beside what else was asked for.


def workload_of_tables(
    tables: InputTables,
    directory: str,
    workload: WorkloadSpec,
    hardware: Hardware,
    nproc: int | None,
    planning: bool,
) -> WorkloadSpec:
    """The workload that the tables are of; a plan is made for their number of devices.

    Args:
        tables: from ``runner.tables``.
        directory: that they were read from.
        workload: as it was asked for.
        hardware: that is here.
        nproc: as it was asked for; ``None``: not at all.
        planning: nothing will be run, so that neither devices nor workload need be asked for.

    Raises:
        BadInputError: something else was asked for than what the tables are of.
        ValueError: the workload itself cannot work.

    """
    devices = tables.machine.devices
    if planning and nproc not in (None, devices):
        raise BadInputError(
            f"nproc={nproc}: runner.tables={directory} are of {devices} devices. Leave nproc out, "
            f'or set "devices" in {directory}/machine.json to plan for others'
        )
    if not planning and devices != hardware.world_size:
        raise BadInputError(
            f"runner.tables={directory}: they are of {devices} devices and here are "
            f"{hardware.world_size}. Set nproc, or measure here without runner.tables"
        )
    if planning and differs_from_default(workload):
        tables.job.require(workload, directory)
    settled = workload.resolve(hardware.device, hardware.memory_gib, devices)
    if planning:
        return replace(settled, global_batch=tables.graph.batch)
    tables.job.require(settled, directory)
    return settled


def describe_tables(tables: InputTables, directory: str | None) -> str:
    """What is planned for, for the terminal."""
    devices = tables.machine.devices
    of = "" if directory is None else f" of runner.tables={directory}"
    return f"planning for {devices} device{'s' if devices > 1 else ''}{of}, {tables.job}"


# -----------------------------------------------------------------------------
# What a step takes beside what was timed by itself, told from one measured step.

_HOST_BOUND = 0.95
"""Share of a step from which on the host decides, so that it tells nothing of the devices."""
_LOADER_BOUND = 0.2
"""Share of a step from which on waiting for the loader says that it does not keep up; less may come
of batches that take unlike long, which any plan has to wait for."""


def calibrated(
    machine: Machine,
    measured: Measurement,
    plan: Plan,
    simulator_of: Callable[[Machine], Simulator],
) -> Machine:
    """The machine with what loading, launching, and running beside one another cost.

    On processors a batch is loaded before the step begins. Devices work while their host loads the
    next batch and launches, so that no step is shorter than that; the copy comes first, and what a
    device waits for the loader all the same (phases are the device's). What else the measured step
    takes longer than the simulated one is shared out between gradients' sums, which are slowed by
    what is computed meanwhile, and tasks, by the devices' time in each.

    Args:
        machine: as it was measured.
        measured: the step.
        plan: that it ran.
        simulator_of: simulates the job on a machine.

    """
    host_ms = measured.bottleneck_evidence.get("host_ms")
    simulator = simulator_of(machine)
    waits_us, copies_us = (
        1e3 * measured.phases_ms.get(name, 0.0) for name in ("dataloader_next", "to_device")
    )
    loading_us = waits_us + copies_us
    step_us = 1e6 * measured.step_time_s
    found = replace(
        machine,
        step_us=machine.step_us + loading_us,
        calibrated=f"the baseline's step of {step_us / 1e3:.4g} ms",
    )
    if host_ms is not None:
        # a loader that does not keep up has batches in store when steps are first timed
        host_us = step_us if waits_us > _LOADER_BOUND * step_us else 1e3 * host_ms
        launching_us = 1e6 * simulator.estimate(plan).launching_seconds
        found = replace(found, host_us=max(0.0, host_us - launching_us))
        if host_us > _HOST_BOUND * step_us:
            return found
        slowdown = machine.sync_slowdown * _slowdown(simulator, plan, loading_us, step_us)
        found = replace(found, sync_slowdown=slowdown)
        simulator = simulator_of(replace(machine, sync_slowdown=found.sync_slowdown))
    rest_us = step_us - loading_us - 1e6 * simulator.estimate(plan).seconds
    tasks = 2 * len(simulator.problem.graph.planned)
    return replace(found, task_us=machine.task_us + max(0.0, rest_us / tasks))


def _slowdown(simulator: Simulator, plan: Plan, loading_us: float, step_us: float) -> float:
    """By how much sums take longer, were they to bear their share of the rest."""
    rest_us = step_us - loading_us - 1e6 * simulator.estimate(plan).seconds
    spent: dict[tuple[bool, int], float] = {}
    for task in simulator.timeline(plan):
        key = task.kind == "sum of gradients", task.device
        spent[key] = spent.get(key, 0.0) + task.end_us - task.begin_us
    sums_us = max((us for (is_sum, _), us in spent.items() if is_sum), default=0.0)
    others_us = max((us for (is_sum, _), us in spent.items() if not is_sum), default=0.0)
    return 1.0 + max(0.0, rest_us) / (sums_us + others_us) if sums_us > 0 else 1.0
