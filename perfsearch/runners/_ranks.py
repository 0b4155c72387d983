"""Between a runner's plan and its ranks: what every runner with worker processes shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace

from perfsearch.core.hardware import (
    Environment,
    GroupSpec,
    Hardware,
    Lane,
    on_cores,
    threads_today,
)
from perfsearch.core.trial import Outcome
from perfsearch.knobs.process import THREADS_VARIABLE
from perfsearch.runners.base import Plan
from perfsearch.workers import processes
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.pool import Pool
from perfsearch.workloads.spec import WorkloadSpec


def group_spec(
    environment: Environment,
    hardware: Hardware,
    workload: WorkloadSpec,
    variables: Mapping[str, str],
    capture_nccl: bool = False,
) -> GroupSpec:
    """The processes that a configuration needs.

    Args:
        environment: what the user asked for.
        hardware: where they run.
        workload: what they train, resolved.
        variables: process-scope environment of the configuration.
        capture_nccl: whether NCCL logs what it uses.

    """
    whole = dict(environment.variables)
    user = {**os.environ, **whole}
    whole[THREADS_VARIABLE] = str(threads_today(user, hardware))
    if hardware.device == "cuda":
        # a failed collective is broken off by the ranks themselves, not by ending the process
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        whole[name] = user.get(name, "0")
    whole.update(variables)
    return GroupSpec(
        workload=asdict(workload),
        device=hardware.device,
        nproc=hardware.nproc,
        nnodes=hardware.nnodes,
        seed=environment.seed,
        env=whole,
        capture_nccl=capture_nccl,
    )


class LanePools:
    """A pool for each trial at a time, on its share of the devices.

    Args:
        environment: where it is on record, and time limits.
        hardware: with its lanes.

    Attributes:
        pools: by lane.

    """

    def __init__(self, environment: Environment, hardware: Hardware) -> None:
        self._run_dir = environment.run_dir
        self._lanes = hardware.lanes or (Lane(hardware.gpus, ()),)
        self._shown = bool(hardware.lanes)
        self.pools = [Pool(environment, lane.gpus) for lane in self._lanes]

    def measure(
        self, spec: GroupSpec, request: TrialRequest, plan: Plan, samples_per_step: int | None
    ) -> Outcome:
        """As ``measure_in_group``, in the plan's lane."""
        lane = self._lanes[plan.lane]
        if self._shown:
            spec = replace(spec, env={**spec.env, **lane.variables})
        with on_cores(lane.cores):
            return measure_in_group(self.pools[plan.lane], spec, request, plan, samples_per_step)

    def break_off(self) -> None:
        """Kill all ranks, from any thread; what measures in them sees that they are gone."""
        processes.reap_groups(self._run_dir, grace_s=0.0)

    def close(self) -> None:
        """End every process."""
        for pool in self.pools:
            pool.close()


def told_shares(hardware: Hardware) -> list[str]:
    """What a user should know of the shares of several trials at a time; nothing for one."""
    if not hardware.lanes:
        return []
    cards = "; ".join(",".join(gpu.uuid for gpu in lane.gpus) for lane in hardware.lanes)
    of_gpus = f", and GPUs {cards}" if hardware.gpus else ""
    return [
        f"each of {len(hardware.lanes)} trials at a time has {hardware.cores} CPU cores of its own"
        f"{of_gpus}; the baseline and the confirmation have the first of these shares, too"
    ]


def measure_in_group(
    pool: Pool, spec: GroupSpec, request: TrialRequest, plan: Plan, samples_per_step: int | None
) -> Outcome:
    """Have a request measured as planned.

    Args:
        pool: of the runner.
        spec: processes that it needs.
        request: recipe and configuration; what the plan says is filled in here.
        plan: how.
        samples_per_step: what throughput counts for a step; ``None``: the global batch.

    """
    request = replace(
        request,
        scored_steps=plan.scored_steps,
        scored_seconds=plan.scored_seconds,
        look_steps=plan.look_steps,
        look_seconds=plan.look_seconds,
        stop_above_s=plan.stop_above_cost_s,
        timeout_s=plan.time_limit_s,
        log_directory=str(plan.log_directory),
        detail=plan.detail,
        begin_step=plan.begin_step,
        end_step=plan.end_step,
        trace=plan.trace,
    )
    outcome = pool.measure(spec, request, plan.time_limit_s, plan.fresh)
    if outcome.measurement is not None and samples_per_step is not None:
        outcome.measurement.samples_per_step = samples_per_step
    return outcome
