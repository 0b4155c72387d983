"""Between a runner's plan and its ranks: what every runner with worker processes shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace

from perfsearch.core.hardware import Environment, GroupSpec, Hardware, threads_today
from perfsearch.core.trial import Outcome
from perfsearch.knobs.process import THREADS_VARIABLE
from perfsearch.runners.base import Plan
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
    if environment.interface:
        whole["GLOO_SOCKET_IFNAME"] = whole["NCCL_SOCKET_IFNAME"] = environment.interface
    whole.update(variables)
    return GroupSpec(
        workload=asdict(workload),
        device=hardware.device,
        nproc=hardware.nproc,
        nnodes=hardware.nnodes,
        rdzv_endpoint=environment.rdzv_endpoint,
        interface=environment.interface,
        seed=environment.seed,
        env=whole,
        capture_nccl=capture_nccl,
    )


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
