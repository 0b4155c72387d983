"""Per-operator parallelisation, searched in a simulator and really run (Jia et al. 2019)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from perfsearch.config.options import build_options
from perfsearch.core import hardware
from perfsearch.core.errors import BadInputError
from perfsearch.core.files import write_text
from perfsearch.core.hardware import Environment, Hardware, detect_hardware
from perfsearch.core.hints import ChainRequest, ChainResult, Hints, Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.losses import loss_disagreement
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import PERTURBED, Outcome, Purpose, Status, Trial
from perfsearch.runners._ranks import group_spec, measure_in_group
from perfsearch.runners.base import (
    ClosingLines,
    HoldsDevices,
    Mode,
    OwnModes,
    Perturbs,
    Runner,
    Screens,
    environment_of,
    workload_of,
)
from perfsearch.runners.base import Plan as MeasuringPlan
from perfsearch.runners.soap import report, space
from perfsearch.runners.soap.chains import run_chains
from perfsearch.runners.soap.job import (
    InputTables,
    Job,
    JobKey,
    describe_tables,
    measured_tables,
    read_tables,
    roles_of,
    workload_of_tables,
)
from perfsearch.soap import formats
from perfsearch.soap.plan import Plan
from perfsearch.soap.simulator.machine import for_devices
from perfsearch.workers import launchers, processes
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.pool import Pool
from perfsearch.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.soap.simulator.simulator import Simulator


class Soap(Runner, HoldsDevices, Screens, Perturbs, ClosingLines, OwnModes):
    """Searches how each operator is split and placed; data parallelism is the baseline.

    Its knobs are the operators of the model, which are known once the job was described; so
    ``space`` and ``baseline`` are there after ``open``. ``docs/soap.md`` says how to pin one.

    Args:
        options: the ``runner.*`` keys.
        workload: the ``workload.*`` keys.
        environment: where and within which limits to run.
        metric: ``objective.metric``.
        planning: nothing will be run, so the devices need not be here.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    requires: ClassVar = {"numba": "soap"}
    several_nodes = True
    own_modes = ("estimate", "measure", "simulate")
    unseen = "its knobs are the operators of the model, which is captured when a search begins"

    @dataclass(frozen=True)
    class Options(Runner.Options):
        """The ``runner.*`` keys of this runner.

        Attributes:
            device: ``auto`` (every visible GPU, else the CPU), ``cpu`` or ``cuda``.
            split: kinds of dimensions that may be split: ``sample``, ``attribute``, ``parameter``.
            import_from: strategy to start from, ours or FlexFlow's; with ``strategy.proposals=0``
                it is measured as it is.
            export_to: where the strategy that is handed over is written, beside the run directory.
            tables: directory with ``graph.json``, ``machine.json`` and ``costs.json`` of an earlier
                search, or edited copies, to plan with instead of measuring.
            cache: directory of measured costs and machines that searches share; ``null``:
                ``~/.cache/perfsearch/soap``.
            devices: to measure parts for (``mode=measure``), also more than are here; ``null``:
                those that are here.
            device_memory_gib: memory to plan for; ``null``: the devices' own.
            min_coverage: smallest share of the forward pass's measured time that must be in
                operators that can be split.
            cuda_graph: replay the step as a CUDA graph where it allows that.
            knobs: by operator: a value such as ``4x1@0,1,2,3`` pins it, a list of them gives its
                choices; others are searched.

        """

        device: str = "auto"
        split: tuple[str, ...] = ("sample", "attribute", "parameter")
        import_from: str | None = None
        export_to: str | None = None
        tables: str | None = None
        cache: str | None = None
        devices: int | None = option(None, low=1)
        device_memory_gib: float | None = option(None, above=0)
        min_coverage: float = option(0.5, low=0, high=1)
        cuda_graph: bool = True
        knobs: Mapping[str, Any] = field(default_factory=dict)

        def __post_init__(self) -> None:
            roles_of(self.split)
            if self.import_from is not None and not Path(self.import_from).is_file():
                raise ValueError(f"runner.import_from={self.import_from}: there is no such file")
            if self.export_to is not None:
                path = Path(self.export_to)
                if path.is_dir():
                    raise ValueError(f"runner.export_to={path}: a directory; a file is needed")
                if not path.parent.is_dir():
                    raise ValueError(
                        f"runner.export_to={path}: there is no directory {path.parent}; "
                        "make it first"
                    )

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Build it from ``runner.*``, ``workload.*``, ``limits.*`` and the top-level keys."""
        options = build_options(cls.Options, settings.runner.options, "runner")
        planning = settings.mode != "search"
        if options.devices is not None and settings.mode != "measure":
            raise BadInputError(
                f"runner.devices={options.devices}: only mode=measure takes it. Measure for so "
                "many devices first, then plan with mode=estimate runner.tables=RUN_DIR/soap"
            )
        if settings.mode == "measure" and options.tables is not None:
            raise BadInputError(
                f"runner.tables={options.tables}: mode=measure makes tables; leave it out"
            )
        metric = settings.objective.metric
        return cls(options, workload_of(settings), environment_of(settings), metric, planning)

    def __init__(
        self,
        options: Options,
        workload: WorkloadSpec,
        environment: Environment,
        metric: str = "throughput",
        planning: bool = False,
    ) -> None:
        super().__init__(options, environment)
        self._metric = metric
        self.hardware = detect_hardware(options.device, environment)
        self.devices = self.hardware.world_size
        self._tables = None
        if options.tables is None:
            self.workload = workload.resolve(
                self.hardware.device, self.hardware.memory_gib, self.devices
            )
        else:
            self._tables = read_tables(Path(options.tables))
            self.devices = self._tables.machine.devices
            self.workload = workload_of_tables(
                self._tables, options.tables, workload, self.hardware, environment.nproc, planning
            )
        self.space = Space([])
        self.baseline: dict[str, Value] = {}
        self.pinned: dict[str, Value] = {}
        self._ranks = Ranks(environment, self.hardware, self.workload)
        self._trials: Sequence[Trial] = ()
        self._job: Job | None = None
        self._no_dtensor = ""

    @property
    def job(self) -> Job:
        """What is known of the job; there after ``open``."""
        assert self._job is not None
        return self._job

    @property
    def inputs(self) -> InputTables:
        """Graph, machine and costs; known after ``open``."""
        return self.job.inputs

    @property
    def simulator(self) -> Simulator:
        """Predicts; there after ``open``."""
        return self.job.simulator

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind, describe the job, and set up the space."""
        super().open(run_dir)
        self._ranks = Ranks(self.environment, self.hardware, self.workload)
        processes.reap_groups(run_dir)
        self.prepare(run_dir / "soap")
        self.simulator.compile(self.job.first_plan)  # not in the time that a search may take

    def prepare(self, directory: Path) -> None:
        """Get graph, machine and costs, and the space that follows from them.

        Raises:
            BadInputError: the job cannot be captured, or a file does not fit it.

        """
        if self._tables is not None:
            inputs = self._tables
            inputs.write(directory)
        else:
            inputs = self._measured(directory, self.devices)  # for the devices that are here
        self._job = Job(inputs, self.options, self.devices)
        lines = (report.baseline_line(inputs.graph, self.devices), report.scatter_line(inputs))
        self.remarks = [line for line in lines if line is not None]
        self.baseline, self.pinned = self._job.baseline, self._job.pinned
        self.space = self.ruled(Space(self._job.searched))

    def _measured(self, directory: Path, devices: int) -> InputTables:
        """Tables with the parts for so many devices, and the machine that is here."""

        def profile(directory: Path, known: list[str], machine: Path | None) -> None:
            self._ranks.describe(directory, known, machine, devices, self.options)

        cache = self.options.cache or "~/.cache/perfsearch/soap"
        return measured_tables(
            directory,
            Path(cache).expanduser(),
            self.hardware.device_name,
            hardware.torch_version(),
            self.devices,
            JobKey.of(self.workload),
            profile,
            self.hardware.nnodes,
        )

    def measure(self, configuration: Configuration, plan: MeasuringPlan) -> Outcome:
        """Train the configuration."""
        text = formats.dump_plan(self.inputs.graph, self.plan(configuration), self.devices)
        outcome = self._ranks.train(text, self.job.replays, plan)
        first = plan.purpose is Purpose.BASELINE and self.devices > 1
        if plan.perturbed and outcome.measurement is not None:
            outcome.measurement.environment[PERTURBED] = True
        if first and outcome.measurement is not None:
            outcome.measurement.environment[report.DDP] = self._ranks.train_by_ddp(plan)
        return outcome

    def plan(self, configuration: Configuration) -> Plan:
        """The plan of a configuration of the space."""
        return self.job.plan(configuration)

    def rounds_otherwise(self, reference: Configuration, configuration: Configuration) -> bool:
        """Every other plan adds up in another order."""
        return key_of(reference) != key_of(configuration)

    def identity(self) -> dict[str, str]:
        """Model, ranks, devices and versions: what a result holds for."""
        return {
            "workload": f"{self.workload.name}/{self.workload.size}/{self.workload.factory or ''}",
            "global_batch": str(self.workload.global_batch),
            **self.hardware.identity(),
            "world_size": str(self.devices),
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """Predicted times and peaks, the memory of a device, and MCMC in the simulator."""
        self._trials = trials
        return Hints(
            baseline=dict(self.baseline),
            memory_limit_gib=self.inputs.machine.memory_gib,
            predict=lambda configuration: self.predict(configuration, trials),
            start=self.job.start,
            run_chain=self._run_chain,
            neighbours=space.neighbours(self.inputs.graph, self.baseline),
        )

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """Simulated time and memory, on a machine that the baseline has told what is beside."""
        self.job.calibrate(trials, self.environment.run_dir / "soap")
        found = self.simulator.estimate(self.plan(configuration))
        assert self.workload.global_batch is not None
        samples = self.workload.samples_per_step or self.workload.global_batch
        per = 1 if self._metric == "latency" else samples
        return Prediction(found.peak_gib, found.seconds / per)

    def screen(self, configuration: Configuration) -> str | None:
        """Refuse what does not fit by the simulator's account."""
        found = self.simulator.estimate(self.plan(configuration))
        if found.fits:
            return None
        return (
            f"it needs {report.size(found.peak_gib)} on one device, of "
            f"{report.size(self.inputs.machine.memory_gib)}"
        )

    def _run_chain(self, request: ChainRequest) -> ChainResult:
        self.job.calibrate(self._trials, self.environment.run_dir / "soap")
        start = self.plan(request.start)
        searched = run_chains(self.job.chain_simulator, start, self.job.named, request)
        found = searched.found
        points = [self.job.searched_of(plan) for _, plan in found.plans] or [dict(request.start)]
        line = report.chain_line(searched, self.inputs.machine.host_us * self.job.replays)
        lines = [self.job.coverage.line(), line]
        if not found.plans:
            lines.append(report.nothing_fits(self.simulator, self.plan(request.start)))
        return ChainResult(points, found.series, "\n".join(lines))

    def measure_tables(self, settings: Settings, note: Callable[[str], None]) -> int:
        """Measure what a plan for ``runner.devices`` needs, on those here (``mode=measure``)."""
        devices = self.options.devices or self.devices
        directory = self.environment.run_dir / "soap"
        processes.reap_groups(self.environment.run_dir)
        with self._nodes(note):
            inputs = self._measured(directory, devices)
        machine, guessed = for_devices(inputs.machine, devices)
        inputs = replace(inputs, machine=machine)
        inputs.write(directory)
        note(describe_tables(inputs, str(directory)))
        scatter = report.scatter_line(inputs)
        if scatter is not None:
            note(scatter)
        if guessed:
            note(f"{guessed}; edit {directory / formats.MACHINE} where you know better")
        note(f"plan with: mode=estimate runner.tables={directory}")
        return 0

    @contextmanager
    def _nodes(self, note: Callable[[str], None]) -> Iterator[None]:
        """Have other nodes there while something is measured outside of a search."""
        if self._tables is not None:
            yield
            return
        launcher = launchers.of(self.environment)
        launcher.open(self.hardware, note)
        try:
            yield
        finally:
            self._ranks.close()
            launcher.close()

    def own_mode(self, mode: str) -> Mode:
        """``measure`` is what every runner does to a configuration, so that the mode has a name."""
        return self.measure_tables if mode == "measure" else super().own_mode(mode)

    def simulate(self, settings: Settings, note: Callable[[str], None]) -> int:
        """Print what is expected of a strategy, without a search (``mode=simulate``)."""
        with self._nodes(note):
            self.prepare(self.environment.run_dir / "soap")
        for line in (describe_tables(self.inputs, self.options.tables), *self.remarks):
            note(line)
        plan = self.job.first_plan
        for line in report.simulation(self.simulator, plan):
            note(line)
        path = self.environment.run_dir / "timeline.json"
        report.write_timeline(self.simulator, plan, path)
        note(f"timeline for chrome://tracing: {path}")
        return 0

    def estimate(self, settings: Settings, note: Callable[[str], None]) -> int:
        """Search in the simulator alone, and print what was found (``mode=estimate``)."""
        with self._nodes(note):
            self.prepare(self.environment.run_dir / "soap")
        for line in (describe_tables(self.inputs, self.options.tables), *self.remarks):
            note(line)
        options = settings.strategy.options
        start = self.job.first_plan
        if options.get("start") is not None:
            given: Configuration = options["start"]
            reasons = self.space.violations(given)
            if reasons:
                raise BadInputError(f"strategy.start={dict(given)}: {'; '.join(reasons)}")
            start = self.plan(self.space.canonical(given))
        how: dict[str, Any] = {
            name: options.get(name)
            for name in ("alpha", "return_every", "propagation", "chains", "seconds")
        }
        request = ChainRequest(
            {},
            options.get("proposals"),
            settings.seed,
            **how,
            acceptance=options.get("acceptance", "percent"),
        )
        searched = run_chains(self.job.chain_simulator, start, self.job.named, request)
        found = searched.found
        if settings.strategy.name not in ("mcmc", "auto"):
            note(f"searched by a Markov chain: strategy={settings.strategy.name} needs trials")
        for line in report.found_lines(self.simulator, searched, start):
            note(line)
        if found.plans:
            for line in self._named_lines(found.plans[0][1], "found", ()):
                note(line)
        if self.options.export_to is not None and found.plans:
            text = formats.dump_plan(self.inputs.graph, found.plans[0][1], self.devices)
            Path(self.options.export_to).write_text(text)
            note(f"written: {self.options.export_to}")
        return 0 if found.plans else 1

    def closing_lines(self, configuration: Configuration, trials: Sequence[Trial]) -> list[str]:
        """The strategy as FlexFlow prints it, and how well the simulator predicted the trials."""
        self.job.calibrate(trials, self.environment.run_dir / "soap")
        lines = formats.plan_table(self.inputs.graph, self.plan(configuration))
        own = [t for t in trials if key_of(t.configuration) == key_of(configuration)]
        worst = report.worst_lines(self._operators_of(own))
        named = self._named_lines(self.plan(configuration), "handed over", trials)
        no_dtensor = [self._no_dtensor] if self._no_dtensor else []
        return [*lines, *named, *no_dtensor, *report.accuracy_lines(self._compared(trials)), *worst]

    def _named_lines(self, plan: Plan, what: str, trials: Sequence[Trial]) -> list[str]:
        """A plan beside those that have a name, simulated, and measured where they were run."""
        measured = {
            key_of(space.configuration_of(self.plan(row.configuration))): row.measured_ms
            for row in self._compared(trials)
        }
        rows = []
        for name, other in {what: plan, **self.job.named}.items():
            milliseconds = measured.get(key_of(space.configuration_of(other)))
            rows.append(report.PlanRow(name, self.simulator.estimate(other), milliseconds))
        return report.plan_rows([*rows, *report.ddp_rows(trials)])

    def _operators_of(self, trials: Sequence[Trial]) -> list[report.OperatorCompared]:
        overhead_ms = 2e-3 * self.inputs.machine.task_us  # forward and backward
        return report.compare_operators(
            trials, self.inputs.graph, self.plan, self.simulator.by_operator, overhead_ms
        )

    def _compared(self, trials: Sequence[Trial]) -> list[report.Compared]:
        return report.compare(trials, lambda c: self.simulator.estimate(self.plan(c)))

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the strategy, its timeline, and simulated against measured times."""
        own = [t for t in self._trials if key_of(t.configuration) == key_of(configuration)]
        strategies = report.write_strategy(
            self.simulator,
            self.plan(configuration),
            self.devices,
            self.options.export_to,
            self._dtensor(configuration),
            report.measured_tasks(own),
            directory,
        )
        tables = report.write_tables(
            self._compared(self._trials), self._operators_of(self._trials), directory
        )
        return [*strategies, *tables]

    def _dtensor(self, configuration: Configuration) -> str | None:
        """The plan as a module for DTensor, where that was run and gave the same losses."""
        own = [t for t in self._trials if key_of(t.configuration) == key_of(configuration)]
        measured = [t.measurement for t in own if t.status is Status.OK and t.measurement]
        losses = [m.first_losses for m in measured if m.first_losses]
        module = None
        try:
            module = formats.dump_dtensor(self.inputs.graph, self.plan(configuration), self.devices)
            why = (
                self._ranks.differs_by_dtensor(module, losses[0])
                if losses
                else "the plan was not run, so that there is nothing to compare it with"
            )
        except formats.NotRegular as error:
            why = str(error)
        self._no_dtensor = f"no dtensor_plan.py: {why}" if why else ""
        return None if why else module

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """Every operator pinned, and nothing imported."""
        pinned = {**self.pinned, **configuration}
        return {"knobs": pinned, "import_from": None, "export_to": None}

    def close(self) -> None:
        """End the warm group."""
        self._ranks.close()
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)


# -----------------------------------------------------------------------------
# Requests of ``runner=soap`` to its ranks: describe the job, or train a plan.


class Ranks:
    """The processes of a search; started when they are first asked for something.

    Args:
        environment: where and within which limits to run.
        hardware: what they run on.
        workload: what they train, resolved.

    """

    def __init__(
        self, environment: Environment, hardware: Hardware, workload: WorkloadSpec
    ) -> None:
        self._environment, self._hardware, self._workload = environment, hardware, workload
        self._pool = Pool(environment, hardware.gpus)
        self._not_examined: set[str] = set()

    def train(self, strategy: str, replays: bool, plan: MeasuringPlan) -> Outcome:
        """Train the text of a strategy as planned, and time its operators afterwards.

        A strategy whose trial had to be repeated without that is not asked for it again.
        """
        examine = strategy not in self._not_examined and not plan.perturbed
        options = {"cuda_graph": replays, "examine": examine, "perturbed": plan.perturbed}
        outcome = self._ask("soap.recipe", {"plan": strategy}, options, plan)
        found = outcome.measurement
        if (
            examine
            and outcome.status is Status.OK
            and found
            and "operators" not in found.environment
        ):
            self._not_examined.add(strategy)
        return outcome

    def train_by_ddp(self, plan: MeasuringPlan) -> dict[str, Any]:
        """Train as ``runner=ddp`` does with torch's defaults: its step, or why there is none."""
        wanted = replace(plan, detail="light", log_directory=plan.log_directory / "ddp")
        outcome = self._ask("training.ddp", {}, {}, wanted)
        if outcome.status is not Status.OK or outcome.measurement is None:
            return {"failed": f"{outcome.status}: {outcome.reason}"}
        return {"step_ms": 1e3 * outcome.measurement.step_time_s}

    def differs_by_dtensor(self, module: str, losses: Sequence[float]) -> str:
        """Why an exported module is not known to train as a plan does; empty where it does.

        Args:
            module: its text.
            losses: the plan's own first ones.

        """
        plan = MeasuringPlan(
            number=-1,
            time_limit_s=self._environment.limits.trial_s,
            scored_steps=(1, 1),
            scored_seconds=0.0,
            log_directory=self._environment.run_dir / "logs" / "dtensor",
        )
        plan.log_directory.mkdir(parents=True, exist_ok=True)
        file = plan.log_directory / "dtensor_plan.py"
        write_text(file, module)
        outcome = self._ask("soap.dtensor_step", {"file": str(file)}, {}, plan)
        if outcome.measurement is None or outcome.status is not Status.OK:
            return f"run by DTensor it ended {outcome.status}: {outcome.reason}"
        tolerance = self._environment.limits.loss_tolerance
        seen = outcome.measurement.first_losses
        return loss_disagreement(losses, seen, tolerance, whose="the plan itself")

    def describe(
        self,
        directory: Path,
        known: list[str],
        machine: Path | None,
        devices: int,
        options: Soap.Options,
    ) -> None:
        """Have the job captured and measured, and the files left in a directory.

        Args:
            directory: of the files.
            known: keys of costs that need not be measured.
            machine: file of one whose transfers are known.
            devices: to plan for.
            options: of the runner.

        Raises:
            BadInputError: it failed; the message has the reason and the log.

        """
        memory_gib = self._hardware.memory_gib
        if memory_gib is None:
            pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory_gib = pages / 2**30 / self._hardware.nproc
        wanted = {
            "directory": str(directory.absolute()),
            "samples": self._workload.global_batch,
            "devices": devices,
            "device_name": self._hardware.device_name,
            "memory_gib": memory_gib,
            "known": known,
            "machine": None if machine is None else str(machine.absolute()),
            "roles": list(options.split),
        }
        plan = MeasuringPlan(
            number=-1,
            time_limit_s=self._environment.limits.trial_s,
            scored_steps=(1, 1),
            scored_seconds=0.0,
            log_directory=self._environment.run_dir / "logs" / "profile",
        )
        outcome = self._ask("soap.profile", {}, wanted, plan)
        if outcome.status is not Status.OK:
            raise BadInputError(
                f"runner=soap: the job could not be described: {outcome.reason}. Full log: "
                f"{outcome.log_path}"
            )

    def _ask(
        self,
        recipe: str,
        configuration: dict[str, Any],
        options: dict[str, Any],
        plan: MeasuringPlan,
    ) -> Outcome:
        assert self._workload.global_batch is not None
        request = TrialRequest(
            serial=0,
            recipe=recipe,
            configuration=configuration,
            samples_per_step=self._workload.global_batch,
            recipe_options=options,
        )
        spec = group_spec(self._environment, self._hardware, self._workload, {})
        counted = self._workload.samples_per_step if recipe == "soap.recipe" else None
        return measure_in_group(self._pool, spec, request, plan, counted)

    def close(self) -> None:
        """End them."""
        self._pool.close()
