"""What a step takes beside what was timed by itself, told from one measured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfsearch.core.trial import Measurement
from perfsearch.parallel.soap.configuration import Plan
from perfsearch.parallel.soap.machine import Machine
from perfsearch.parallel.soap.simulator import Simulator

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
