"""DistributedDataParallel's knobs, measured on real ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from perfsearch import knobs
from perfsearch.config.options import build_options
from perfsearch.core import hardware
from perfsearch.core.hardware import (
    Environment,
    GroupSpec,
    detect_hardware,
    threads_today,
)
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Scope, Value
from perfsearch.core.narrow import expanded, narrow, on_device
from perfsearch.core.space import Space
from perfsearch.core.trial import Outcome, Trial
from perfsearch.knobs import nccl
from perfsearch.knobs.base import Job, Use, applicable, declare
from perfsearch.knobs.process import THREADS
from perfsearch.knobs.starts import starts
from perfsearch.runners._ranks import LanePools, group_spec, told_shares
from perfsearch.runners.base import (
    HoldsDevices,
    MeasuresBeside,
    Plan,
    Runner,
    TakesScripts,
    environment_of,
    workload_of,
)
from perfsearch.runners.ddp import export
from perfsearch.workers import processes
from perfsearch.workers.messages import TrialRequest
from perfsearch.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings


class DDP(Runner, HoldsDevices, MeasuresBeside, TakesScripts):
    """Searches the settings of DistributedDataParallel, its optimizer, its data loader and NCCL.

    Nothing is started before the first ``measure``. Groups of ranks stay warm between trials as
    long as their process-scope values allow; ``close`` ends them.

    Args:
        options: the ``runner.*`` keys.
        workload: the ``workload.*`` keys.
        environment: where and within which limits to run.

    Attributes:
        pinned: knobs that every configuration shares, the baseline too.
        left_out: knobs that are not searched although they were asked for by default, and why.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    several_nodes = True

    @dataclass(frozen=True)
    class Options(Runner.Options):
        """The ``runner.*`` keys of this runner.

        Attributes:
            device: ``auto`` (every visible GPU, else the CPU), ``cpu`` or ``cuda``.
            knobs: ``runner.knobs``, as ``perfsearch.core.narrow`` reads it, or ``auto``.

        """

        device: str = "auto"
        knobs: Mapping[str, Any] = field(
            default_factory=lambda: {record.name: record.setting for record in knobs.of(Use.DDP)}
        )

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Build it from ``runner.*``, ``workload.*``, ``limits.*`` and the top-level keys."""
        return cls(_options(settings), workload_of(settings), environment_of(settings))

    @classmethod
    def for_script(cls, settings: Settings) -> tuple[str, Mapping[str, Any]]:
        """What the script runner is told of ``runner.*``."""
        options = _options(settings)
        return options.device, options.knobs

    def __init__(self, options: Options, workload: WorkloadSpec, environment: Environment) -> None:
        super().__init__(options, environment)
        self.hardware = detect_hardware(options.device, environment)
        self.devices = self.hardware.world_size
        self.workload = workload.resolve(
            self.hardware.device, self.hardware.memory_gib, self.hardware.world_size
        )
        environ = {**os.environ, **environment.variables}
        self._job = Job(
            self.hardware,
            environ,
            hardware.wrapper_parameters(),
            threads_today(environ, self.hardware),
            self.workload.traits.convolutional,
            self.workload.traits.draws_in_loader,
            attends=self.workload.traits.attends,
            repeats=self.workload.traits.repeats,
        )
        declared, absent = declare(knobs.of(Use.DDP), self._job)
        today = {THREADS.name: self._job.threads}
        today |= {r.name: r.default for r in knobs.of(Use.DDP) if r.name not in today}
        wanted = on_device(options.knobs, today, self._job.on_gpu)
        settings, self.left_out = applicable(wanted, declared, absent, today, environment.numerics)
        searched, self.pinned = narrow(declared, settings, environment.numerics)
        rules = nccl.constraints([knob.name for knob in searched], self.pinned)
        self.space = Space(searched, rules)
        self.baseline = {knob.name: knob.default for knob in searched}
        self.declared = {knob.name: knob for knob in declared}
        self.remarks = told_shares(self.hardware)
        self.lanes = len(self.hardware.lanes) or 1
        self._pools = LanePools(environment, self.hardware)

    def open(self, run_dir: Path) -> None:
        """End the processes that a killed controller of this search left behind."""
        super().open(run_dir)
        self._pools = LanePools(self.environment, self.hardware)
        processes.reap_groups(run_dir)

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Train the configuration in a group of ranks that fits it."""
        whole = {**self.pinned, **configuration}
        group_scope = {n: v for n, v in whole.items() if self.declared[n].scope is Scope.GROUP}
        assert self.workload.global_batch is not None
        request = TrialRequest(
            serial=0,
            recipe="training.ddp",
            configuration=whole,
            group_values=group_scope,
            group_env=nccl.environment(whole, of_communicator=True),
            samples_per_step=self.workload.global_batch,
        )
        spec = self._group_spec(whole)
        return self._pools.measure(spec, request, plan, self.workload.samples_per_step)

    def break_off(self) -> None:
        """Kill the ranks of every trial that is under way."""
        self._pools.break_off()

    def _group_spec(self, whole: Mapping[str, Value]) -> GroupSpec:
        variables = nccl.environment(whole, of_communicator=False)
        watched = any(
            record.name in self.space.by_name or record.of(self.pinned)
            for record in nccl.RECORDS
            if record.of_communicator
        )
        return group_spec(
            self.environment, self.hardware, self.workload, variables, capture_nccl=watched
        )

    def identity(self) -> dict[str, str]:
        """Model, ranks, devices and versions: what a result holds for."""
        return {
            "workload": f"{self.workload.name}/{self.workload.size}/{self.workload.factory or ''}",
            "global_batch": str(self.workload.global_batch),
            **self.hardware.identity(),
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """The order of expected effects; the memory of a device."""
        order = tuple(n for n in knobs.effect_order(Use.DDP) if n in self.space.by_name)
        return Hints(
            baseline=dict(self.baseline),
            effect_order=order,
            starts=tuple(starts(self.space.by_name, self.baseline)),
            memory_limit_gib=self.hardware.memory_gib,
        )

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write ``env.sh`` and ``ddp.py``: the same without perfsearch."""
        whole = {**self.pinned, **configuration}
        return export.write(whole, self.hardware, self._job.threads, directory)

    def close(self) -> None:
        """End the warm group, and what an interrupt kept from becoming one."""
        self._pools.close()
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)


def _options(settings: Settings) -> DDP.Options:
    chosen = expanded(settings.runner.options, DDP.Options().knobs)
    return build_options(DDP.Options, chosen, "runner")
