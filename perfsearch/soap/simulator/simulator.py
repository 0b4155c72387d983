"""Predicted time and memory of plans, and a search over them, for one job on one machine."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from perfsearch.soap.graph import Graph, Role
from perfsearch.soap.plan import OperatorConfiguration, OperatorTime, Plan
from perfsearch.soap.simulator import memory
from perfsearch.soap.simulator.chain import NEVER, ChainOptions, Engine
from perfsearch.soap.simulator.machine import Machine
from perfsearch.soap.simulator.problem import CostOf, Problem
from perfsearch.soap.simulator.timeline import Task

_KINDS = {
    memory.FORWARD: "forward",
    memory.BACKWARD: "backward",
    memory.SEND_FORWARD: "transfer",
    memory.SEND_BACKWARD: "transfer of gradients",
    memory.SYNCHRONISE: "sum of gradients",
    memory.OPTIMIZE: "optimizer",
    memory.COPY: "copy",
    memory.COPY_SUM: "copy",
}
_OF_EDGES = (memory.SEND_FORWARD, memory.SEND_BACKWARD, memory.COPY)
_LOOKS = 40
"""Times that a chain is looked at, whether to go on."""
POINTS = 1000
"""Points of a search's series at most."""


@dataclass(frozen=True)
class Estimate:
    """What is expected of a plan.

    Attributes:
        seconds: of a step.
        peak_gib: of the fullest device.
        memory_gib: of each device.
        fits: whether every device's memory suffices.
        launching_seconds: how long launching its tasks keeps the busiest host.

    """

    seconds: float
    peak_gib: float
    memory_gib: tuple[float, ...]
    fits: bool
    launching_seconds: float = 0.0


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9 if 0 <= nanoseconds < NEVER else math.inf


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        plans: the best distinct ones with their predicted seconds, best first.
        series: iteration, then current, proposed and best seconds; infinite where a plan is beyond
            memory.
        proposals: simulated.
        accepted: of these.
        infeasible: of these, beyond memory.
        seconds: that it took.

    """

    plans: list[tuple[float, Plan]]
    series: list[tuple[int, float, float, float]] = field(default_factory=list)
    proposals: int = 0
    accepted: int = 0
    infeasible: int = 0
    seconds: float = 0.0

    @property
    def proposals_per_s(self) -> float:
        """How fast it was."""
        return self.proposals / self.seconds if self.seconds > 0 else 0.0


class Simulator:
    """Simulates one job on one machine.

    Args:
        graph: of the job.
        machine: to plan for.
        cost_of: times of parts.
        roles: of dimensions that a search may split.
        extra: plans that must be among those that can be simulated, whatever the search offers.
        allowed: for some operators all that they may have; ``extra`` must keep to it.

    Attributes:
        problem: the choices.

    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        cost_of: CostOf,
        roles: frozenset[Role] = frozenset(Role),
        extra: tuple[Plan, ...] = (),
        allowed: Mapping[str, tuple[OperatorConfiguration, ...]] | None = None,
    ) -> None:
        self.problem = Problem(graph, machine, cost_of, roles, extra, allowed)
        self._engine = Engine(self.problem.tables, self.problem.curves)

    def estimate(self, plan: Plan) -> Estimate:
        """Simulate a plan whole.

        Raises:
            PlanError: it has a configuration that is not among the choices.

        """
        nanoseconds = self._engine.start(self.problem.numbers_of(plan))
        by_device = tuple((self._engine.memory_bytes() / 2**30).tolist())
        launching = self._engine.host_ns() / 1e9
        return Estimate(
            nanoseconds / 1e9, max(by_device), by_device, self._engine.fits(), launching
        )

    def compile(self, start: Plan) -> None:
        """Compile what ``search`` runs, or take it from the disk: minutes on a busy machine, once.

        Args:
            start: any plan.

        """
        engine = Engine(self.problem.tables, self.problem.curves)
        engine.start(self.problem.numbers_of(start))
        engine.run(0)

    def search(
        self,
        start: Plan,
        proposals: int,
        options: ChainOptions,
        seed: int,
        seconds: float | None = None,
    ) -> Found:
        """Run a chain from a plan; the same arguments give the same result, bit for bit.

        It ends early where half of its proposals brought nothing.

        Args:
            start: where to begin.
            proposals: at most.
            options: of the chain.
            seed: of the draws.
            seconds: at most; what is found then depends on the machine's speed.

        """
        every = max(1, -(-proposals // POINTS))
        options = replace(options, every=every, points=proposals // every)
        engine = Engine(self.problem.tables, self.problem.curves, seed, options)
        engine.start(self.problem.numbers_of(start))
        engine.run(0)  # compiles, or takes the compiled code from the disk
        begin = time.perf_counter()
        done = 0
        for part in range(1, _LOOKS + 1):
            done = part * proposals // _LOOKS
            engine.run(done)
            spent = time.perf_counter() - begin
            if 2 * (done - engine[memory.IMPROVED]) >= proposals:
                break
            if seconds is not None and spent >= seconds:
                break
        return Found(
            plans=[(ns / 1e9, self.problem.plan_of(numbers)) for ns, numbers in engine.best()],
            series=[
                (int(n), _seconds(current), _seconds(proposed), _seconds(best))
                for n, current, proposed, best in engine.series().tolist()
            ],
            proposals=done,
            accepted=engine[memory.ACCEPTED],
            infeasible=engine[memory.INFEASIBLE_COUNT],
            seconds=spent,
        )

    def drift(self, start: Plan, changes: int, seed: int) -> Plan:
        """A plan some random proposals away that fits memory: all are accepted, whatever they cost.

        Args:
            start: where to begin.
            changes: proposals.
            seed: of the draws.

        """
        options = ChainOptions(alpha=0.0)
        engine = Engine(self.problem.tables, self.problem.curves, seed, options)
        engine.start(self.problem.numbers_of(start))
        engine.run(changes)
        return self.problem.plan_of(engine.current())

    def by_operator(self, plan: Plan) -> dict[str, OperatorTime]:
        """What each operator takes of a plan's step, each time on its slowest device.

        A transfer belongs to the first operator that reads what it moves. What tasks take beside
        their own time (``Machine.task_us``, ``Machine.sync_slowdown``) is left out.
        """
        machine = self.problem.machine
        beside_ms = round(1e3 * machine.task_us) / 1e6
        shape = (len(self.problem.operators), 3, machine.devices)
        found = np.zeros(shape)
        for kind, subject, device, begin, end in self._engine.trace(
            self.problem.numbers_of(plan)
        ).tolist():
            if kind == memory.OPTIMIZE:
                continue
            operator = self.problem.edges[subject][1] if kind in _OF_EDGES else subject
            column = {memory.FORWARD: 0, memory.BACKWARD: 1}.get(kind, 2)
            own_ms = (end - begin) / 1e6 - (beside_ms if column < 2 else 0.0)
            own_ms /= machine.sync_slowdown if kind == memory.SYNCHRONISE else 1.0
            found[operator, column, device] += own_ms
        slowest = np.round(found.max(axis=2), 6).tolist()
        return {
            operator.name: OperatorTime(*times)
            for operator, times in zip(self.problem.operators, slowest, strict=True)
        }

    def timeline(self, plan: Plan) -> list[Task]:
        """Every task of a plan's step."""
        names = [o.name for o in self.problem.operators]
        edges = self.problem.edges
        found = []
        for kind, subject, device, begin, end in self._engine.trace(
            self.problem.numbers_of(plan)
        ).tolist():
            name = "weights"
            if kind in _OF_EDGES:
                source, target, _ = edges[subject]
                name = f"{names[source]} to {names[target]}"
            elif subject >= 0:
                name = names[subject]
            found.append(Task(_KINDS[kind], name, device, begin / 1e3, end / 1e3))
        return found
