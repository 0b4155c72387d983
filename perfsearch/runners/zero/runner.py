"""ZeRO stages, batches and activation checkpointing, measured on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from perfsearch.config.options import build_options
from perfsearch.core.errors import nearest
from perfsearch.core.hardware import Environment, detect_hardware
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Numerics, Scope, Value
from perfsearch.core.narrow import SEARCH, expanded, narrow
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Outcome, Purpose, Status, Trial
from perfsearch.knobs import zero
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, checked, settle
from perfsearch.knobs.ddp import BUCKET_CAP, BUCKET_VIEW
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.optimizer import IMPLEMENTATION
from perfsearch.knobs.zero import CHECKPOINTING
from perfsearch.metrics.gpu import MEMORY_GIB
from perfsearch.runners._ranks import LanePools, group_spec, told_shares
from perfsearch.runners.base import (
    Advises,
    HoldsDevices,
    MeasuresBeside,
    OwnModes,
    Plan,
    Runner,
    Screens,
    TakesScripts,
    environment_of,
    workload_of,
)
from perfsearch.runners.zero import export, memory
from perfsearch.runners.zero.memory import HEADROOM, FactsSource, Memory
from perfsearch.workers import processes
from perfsearch.workers.messages import TrialRequest
from perfsearch.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_SEARCHED = (STAGE.name, MICRO_BATCH.name, ACCUMULATION.name, CHECKPOINTING.name)

_WITH_AUTO = (*_SEARCHED, BUCKET_VIEW.name, BUCKET_CAP.name, IMPLEMENTATION.name)
"""What ``runner.knobs=auto`` lets the diagnosis choose from."""

_FEWEST_STEPS = 5
"""Scored steps of a search trial at least; more where that many take less than the scored time.

Steps of large models take a quarter of a second and more and differ by less than a percent."""

_FAR_SLOWER = 2.0
"""A step that takes so many times the best one ends its trial early."""


class Zero(Runner, HoldsDevices, MeasuresBeside, TakesScripts, Screens, Advises, OwnModes):
    """Searches ZeRO stage, micro-batch, accumulation and activation checkpointing.

    With ``batch=fixed`` every configuration trains the baseline's global batch exactly. What
    surely does not fit is refused without a trial; what leaves less than
    ``runner.memory_headroom`` of a GPU unused counts as out of memory, and a finalist must also
    live through its longest batch and the making of a checkpoint.

    Args:
        options: the ``runner.*`` keys.
        workload: the ``workload.*`` keys.
        environment: where and within which limits to run.
        batch: ``fixed`` or ``free``.
        planning: nothing will be run, so the devices need not be here.

    Attributes:
        pinned: knobs that every configuration shares, the baseline too.
        left_out: knobs that are not searched although they were asked for by default, and why.
        batch: the arithmetic of batches.
        memory: predictions.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    several_nodes = True

    @dataclass(frozen=True)
    class Options(Runner.Options):
        """The ``runner.*`` keys of this runner.

        Attributes:
            device: ``auto`` (every visible GPU, else the CPU), ``cpu`` or ``cuda``.
            micro_batch: samples of a forward pass today; ``null``: a rank's whole share of the
                global batch, that is, no accumulation.
            max_train_batch_size: largest global batch, with ``batch=free``.
            min_train_batch_size: smallest global batch, with ``batch=free``.
            memory_headroom: share of a device's memory that a configuration must leave unused.
            device_memory_gib: memory to plan for; ``null``: the devices' own.
            card: a card to plan for, which need not be here; gives ``device_memory_gib``.
            knobs: ``runner.knobs``, as ``perfsearch.core.narrow`` reads it, or ``auto``.

        """

        device: str = "auto"
        micro_batch: int | None = option(None, low=1)
        max_train_batch_size: int | None = option(None, low=1)
        min_train_batch_size: int = option(1, low=1)
        memory_headroom: float = option(HEADROOM, low=0, high=0.9)
        device_memory_gib: float | None = option(None, above=0)
        card: str | None = None
        knobs: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(_SEARCHED, SEARCH))

        def __post_init__(self) -> None:
            if self.card is not None and self.card not in MEMORY_GIB:
                raise ValueError(
                    f"runner.card={self.card}: unknown. {nearest(self.card, MEMORY_GIB)} "
                    "Or give runner.device_memory_gib"
                )

    own_modes = ("estimate",)

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Build it from ``runner.*``, ``workload.*``, ``limits.*`` and the top-level keys."""
        options, workload = _options(settings), workload_of(settings)
        planning = settings.mode == "estimate"
        return cls(options, workload, environment_of(settings), settings.batch, planning)

    @classmethod
    def for_script(cls, settings: Settings) -> tuple[str, Mapping[str, Any]]:
        """What the script runner is told of ``runner.*``."""
        options = _options(settings)
        return options.device, options.knobs

    def __init__(
        self,
        options: Options,
        workload: WorkloadSpec,
        environment: Environment,
        batch: Literal["fixed", "free"] = "fixed",
        planning: bool = False,
    ) -> None:
        super().__init__(options, environment)
        self.hardware = detect_hardware(options.device, environment)
        self.devices = self.hardware.world_size
        capacity = options.device_memory_gib or MEMORY_GIB.get(options.card or "")
        named = planning and capacity is not None
        device = "cuda" if named else self.hardware.device
        capacity = capacity or self.hardware.memory_gib
        self.workload = workload.resolve(device, capacity, self.devices)
        assert self.workload.global_batch is not None
        self.batch = checked(
            batch,
            self.workload.global_batch,
            self.devices,
            options.micro_batch,
            options.min_train_batch_size,
            options.max_train_batch_size,
        )
        declared, absent = zero.declare(self.batch, device == "cuda")
        settings, self.left_out = zero.applicable(
            settle(self.batch, options.knobs),
            declared,
            absent,
            environment.numerics,
            batch == "free",
        )
        searched, self.pinned = narrow(declared, settings, Numerics.ALTERING)
        self.space = Space(searched, [self.batch.constraint(self.pinned)])
        self.baseline = {knob.name: knob.default for knob in searched}
        self.declared = {knob.name: knob for knob in declared}
        self._facts = FactsSource(self.workload, environment.seed, device, environment.run_dir)
        self.memory = Memory(
            self._facts,
            self.batch,
            self.pinned,
            capacity,
            on_gpu=device == "cuda",
            headroom=options.memory_headroom,
        )
        self.remarks = told_shares(self.hardware)
        self.lanes = len(self.hardware.lanes) or 1
        self._pools = LanePools(environment, self.hardware)
        self._trials: Sequence[Trial] = ()
        self._survived: set[str] = set()

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind; begin to describe the job's tensors."""
        super().open(run_dir)
        self._pools = LanePools(self.environment, self.hardware)
        processes.reap_groups(run_dir)
        self._facts.start()

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Train the configuration in a group of ranks, and hold its memory against the headroom."""
        whole = self.whole(configuration)
        samples = self.batch.global_batch_of(whole)
        key = key_of(configuration)
        is_baseline = key == key_of(self.baseline)
        survive = plan.purpose is Purpose.CONFIRM and not is_baseline and key not in self._survived
        of_group = {n for n, knob in self.declared.items() if knob.scope is Scope.GROUP}
        request = TrialRequest(
            serial=0,
            recipe="training.zero",
            configuration=whole,
            group_values={n: v for n, v in whole.items() if n in of_group},
            samples_per_step=samples,
            recipe_options={"survive": survive},
        )
        plan = self._bounded(plan)
        spec = group_spec(self.environment, self.hardware, self.workload, {})
        counted = self.workload.samples_per_step
        if counted is not None:
            counted = counted * samples // self.batch.global_batch
        outcome = self._pools.measure(spec, request, plan, counted)
        if outcome.status is not Status.OK or is_baseline:
            return outcome
        if outcome.measurement is not None:
            lack = self.memory.lacks_headroom(outcome.measurement)
            if lack:
                return replace(outcome, status=Status.OOM, reason=lack)
        if survive:
            self._survived.add(key)
        return outcome

    def break_off(self) -> None:
        """Kill the ranks of every trial that is under way."""
        self._pools.break_off()

    def whole(self, configuration: Configuration) -> dict[str, Value]:
        """The accumulation follows from the micro-batch where the batch is fixed."""
        whole = super().whole(configuration)
        return {**whole, ACCUMULATION.name: self.batch.accumulation_of(whole)}

    def _bounded(self, plan: Plan) -> Plan:
        """Score fewer long steps; stop what is surely far slower than the best so far.

        A small micro-batch of a sharded stage may take many times as long as what is known.
        """
        times = [
            t.measurement.step_time_s
            for t in self._trials
            if t.status is Status.OK and t.measurement is not None
        ]
        if plan.purpose is not Purpose.SEARCH:
            return plan
        low, high = plan.scored_steps
        plan = replace(plan, scored_steps=(min(low, _FEWEST_STEPS), high))
        if self.batch.rule == "free" or not times:
            return plan
        return replace(plan, stop_above_cost_s=_FAR_SLOWER * min(times))

    def identity(self) -> dict[str, str]:
        """Model, ranks, devices, versions and rule of the batch: what a result holds for."""
        return {
            "workload": f"{self.workload.name}/{self.workload.size}/{self.workload.factory or ''}",
            "global_batch": f"{self.batch.global_batch} {self.batch.rule}",
            **self.hardware.identity(),
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """Larger micro-batches are faster until memory ends; stages in order; predicted peaks."""
        self._trials = trials
        names = self.space.by_name
        return Hints(
            baseline=dict(self.baseline),
            effect_order=tuple(n for n in zero.EFFECT_ORDER if n in names),
            monotonic={MICRO_BATCH.name: 1} if MICRO_BATCH.name in names else {},
            stage_knob=STAGE.name if STAGE.name in names else None,
            memory_limit_gib=self.memory.limit_gib,
            predict=lambda configuration: self.predict(configuration, trials),
        )

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """The peak of a rank's memory, from the tensors' shapes and the trials so far."""
        return self.memory.predict(configuration, trials)

    def screen(self, configuration: Configuration) -> str | None:
        """Refuse what surely does not fit, and what the model's blocks do not allow."""
        return self.memory.refusal(configuration, self._trials)

    def advice(self, trials: Sequence[Trial]) -> str:
        """What to do when nothing ran: what came closest, and by how much it is too large."""
        return self.memory.advice(self.space, trials)

    def estimate(self, settings: Settings, note: Callable[[str], None]) -> int:
        """Print what would fit, stage by micro-batch, without a search (``mode=estimate``)."""
        offered: dict[str, tuple[Value, ...]] = {
            name: (value,) for name, value in self.pinned.items()
        }
        offered |= {knob.name: knob.choices() or (knob.default,) for knob in self.space.knobs}
        lines = memory.estimate_table(self.memory, self.batch, self.workload, offered)
        for line in lines:
            note(line)
        return 0 if self.memory.facts.get() is not None else 1

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the torch form, DeepSpeed's, Trainer's and Accelerate's, and a summary table."""
        whole = {**self.pinned, **configuration}
        facts = self.memory.facts.get()
        return export.export_files(whole, self.batch, self.hardware, facts, self._trials, directory)

    def close(self) -> None:
        """End the warm group and the process that describes the job."""
        self._facts.close()
        self._pools.close()
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)


def _options(settings: Settings) -> Zero.Options:
    chosen = expanded(settings.runner.options, dict.fromkeys(_WITH_AUTO, SEARCH))
    return build_options(Zero.Options, chosen, "runner")
