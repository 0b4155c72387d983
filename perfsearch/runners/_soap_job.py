"""A described job: graph, machine and costs, the simulator over them, and what is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.parallel.soap.configuration import Plan, PlanError, data_parallel
from perfsearch.parallel.soap.coverage import coverage
from perfsearch.parallel.soap.machine import Machine
from perfsearch.parallel.soap.simulator import Simulator
from perfsearch.runners import _soap_plans, _soap_report, _soap_tables
from perfsearch.runners._soap_calibration import calibrated

if TYPE_CHECKING:
    from perfsearch.runners._soap_options import SoapOptions


class Job:
    """What a search over per-operator parallelisation knows before and while it runs.

    Args:
        inputs: graph, machine and costs, as they were measured or given.
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

    Raises:
        BadInputError: too little of the model can be planned, or a file does not fit it.

    """

    def __init__(self, inputs: _soap_tables.Inputs, options: SoapOptions, devices: int) -> None:
        self._options = options
        self._devices = devices
        self.inputs = _soap_tables.limited(inputs, options.device_memory_gib)
        graph = self.inputs.graph
        if not graph.planned:
            raise BadInputError(
                "runner=soap: nothing to parallelise: the loss is computed from the batch alone, "
                "by no operator that has a parameter before it. Give a model that trains some"
            )
        self.coverage = coverage(graph)
        refusal = self.coverage.refusal(options.min_coverage)
        if refusal is not None:
            raise BadInputError(f"runner.min_coverage={options.min_coverage:g}: {refusal}")
        start = data_parallel(graph, range(devices))
        imported = self._imported()
        self._extra = (start,) if imported is None else (start, imported)
        asked = _soap_plans.by_operator(options.knobs)
        self._allowed = _soap_plans.allowed(graph, start, asked, devices)
        self.simulator = self._simulator(self.inputs.machine)
        self.searched, self.pinned = _soap_plans.knobs(self.simulator.problem, start, asked)
        self.baseline: dict[str, Value] = {knob.name: knob.default for knob in self.searched}
        self.start: dict[str, Value] | None = None
        if imported is not None:
            whole = _soap_plans.configuration_of(imported)
            self.start = {name: whole[name] for name in self.baseline}

    @property
    def replays(self) -> bool:
        """Whether steps are replayed, so that launching costs the host nothing."""
        return self._options.cuda_graph and self.inputs.machine.can_replay

    def plan(self, configuration: Configuration) -> Plan:
        """The plan of a configuration of the space."""
        return _soap_plans.plan_of({**self.pinned, **configuration})

    def searched_of(self, plan: Plan) -> dict[str, Value]:
        """The configuration of a plan; operators that are pinned are left out."""
        whole = _soap_plans.configuration_of(plan)
        return {name: whole[name] for name in self.baseline}

    @property
    def first_plan(self) -> Plan:
        """Where a search begins."""
        return self.plan({**self.baseline, **(self.start or {})})

    def calibrate(self, trials: Sequence[Trial], directory: Path) -> None:
        """Let the measured baseline say what steps and tasks take beside what was timed.

        The result is kept with the search's tables, so that it can be walked again without it.

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
        machine.write(directory / _soap_tables.MACHINE)
        self.simulator = self._simulator(machine)

    @property
    def walked(self) -> Simulator:
        """What a search walks in: where hosts that replay decide, all plans are equal to them, so
        that it goes by the devices alone.
        """
        if self.replays and self.inputs.machine.host_us > 0:
            return self._simulator(replace(self.inputs.machine, host_us=0.0))
        return self.simulator

    def _simulator(self, machine: Machine) -> Simulator:
        if self.replays:
            machine = replace(machine, transfer_host_us=0.0, sync_host_us=0.0)
        return Simulator(
            self.inputs.graph,
            machine,
            self.inputs.cost_of(self.replays),
            _soap_tables.roles_of(self._options.split),
            self._extra,
            self._allowed,
        )

    def _imported(self) -> Plan | None:
        path = self._options.import_from
        if path is None:
            return None
        try:
            return _soap_report.import_plan(Path(path), self.inputs.graph, self._devices)
        except PlanError as error:
            raise BadInputError(f"runner.import_from={path}: {error}") from error
