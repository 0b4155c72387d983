"""At most one warm group of ranks: reused where it fits, replaced where it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfsearch.runners.base import Outcome, Plan
from perfsearch.search.knob import Value
from perfsearch.search.trial import Measurement, Status
from perfsearch.workers import devices
from perfsearch.workers.devices import Gpu
from perfsearch.workers.environment import Environment
from perfsearch.workers.failures import Failure
from perfsearch.workers.group import WorkerGroup
from perfsearch.workers.messages import GroupSpec, TrialRequest, rank_log
from perfsearch.workers.preload import Preloaded, early_variables


class Pool:
    """Keeps the group of the last trial, and measures in it whatever its processes allow.

    Args:
        environment: where it is on record, and time limits.
        gpus: GPUs that its groups use.

    """

    def __init__(self, environment: Environment, gpus: tuple[Gpu, ...] = ()) -> None:
        self._environment = environment
        self._gpus = gpus
        self._group: WorkerGroup | None = None
        self._preloaded: Preloaded | None = None

    def measure(self, spec: GroupSpec, request: TrialRequest, plan: Plan) -> Outcome:
        """Measure one configuration in a group of ``spec``; failures are outcomes.

        Args:
            spec: processes that the configuration needs.
            request: what the ranks are to do; the pool fills in what the plan says.
            plan: how.

        """
        fresh = plan.fresh or self._group is None or not self._fits(spec)
        if fresh:
            failure = self._replace(spec, plan)
            if failure is not None:
                return self._failed(failure, plan, fresh)
        assert self._group is not None
        group = self._group
        surroundings = devices.conditions(self._gpus, group.pids) if self._gpus else {}
        request = replace(
            request,
            scored_steps=plan.scored_steps,
            scored_seconds=plan.scored_seconds,
            stop_above_s=plan.stop_above_cost_s,
            timeout_s=plan.time_limit_s,
            log_directory=str(plan.log_directory),
            detail=plan.detail,
        )
        reply = group.run(request, plan.time_limit_s)
        if not reply.alive or not group.alive:
            self._end_group()
        if reply.failure is not None:
            return self._failed(reply.failure, plan, fresh)
        return _succeeded(reply.message, group.info, request, plan, fresh, surroundings)

    def _fits(self, spec: GroupSpec) -> bool:
        group = self._group
        return group is not None and group.alive and group.spec.key == spec.key

    def _replace(self, spec: GroupSpec, plan: Plan) -> Failure | None:
        self._end_group()
        environment = {**os.environ, **spec.env}
        group = WorkerGroup(spec, self._environment.limits, self._preload(environment), self._gpus)
        failure = group.start(plan.log_directory)
        if failure is None:
            self._group = group
        return failure

    def _failed(self, failure: Failure, plan: Plan, fresh: bool) -> Outcome:
        log = rank_log(plan.log_directory, failure.rank or 0)
        if failure.rank is None and not log.exists():
            log = plan.log_directory / "launcher.log"
        return Outcome(failure.status, None, failure.reason, str(log), fresh)

    def _preload(self, environment: Mapping[str, str]) -> Preloaded:
        """A process to fork from whose imports saw this environment."""
        kept = self._preloaded
        if kept is not None and kept.alive and kept.early == early_variables(environment):
            return kept
        self.close()
        run_dir = self._environment.run_dir
        self._preloaded = Preloaded(environment, run_dir, run_dir / "logs" / "launcher.log")
        return self._preloaded

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.end()

    def close(self) -> None:
        """End every process."""
        self._end_group()
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None:
            preloaded.close(self._environment.limits.grace_s)


def _succeeded(
    message: Mapping[str, Any],
    info: Mapping[str, Any],
    request: TrialRequest,
    plan: Plan,
    fresh: bool,
    surroundings: dict[str, Any],
) -> Outcome:
    measurement = Measurement(**message["measurement"])
    batch = request.samples_per_step
    if info.get("tokens_per_sample"):
        measurement.tokens_per_step = int(info["tokens_per_sample"]) * batch
    if info.get("flops_per_sample"):
        measurement.flops_per_step = float(info["flops_per_sample"]) * batch
    measurement.environment = surroundings
    status, reason = Status(message["status"]), str(message["reason"])
    if status is Status.OK:
        ignored = not_in_force(request.configuration, measurement.in_force)
        if ignored:
            status, reason = Status.NOT_APPLIED, "; ".join(ignored)
    log = str(rank_log(plan.log_directory, 0))
    return Outcome(status, measurement, reason, log, fresh, extra={"info": dict(info)})


def not_in_force(requested: Mapping[str, Value], in_force: Mapping[str, Value]) -> list[str]:
    """Knobs that were read back as something else than was asked for; ``None`` asks nothing."""
    return [
        f"{name}={wanted} was asked for, {in_force[name]} is in effect"
        for name, wanted in requested.items()
        if wanted is not None and name in in_force and not _agree(wanted, in_force[name])
    ]


def _agree(wanted: Value, found: Value) -> bool:
    if isinstance(wanted, bool) or isinstance(found, bool):
        return wanted is found
    if isinstance(wanted, int | float) and isinstance(found, int | float):
        return abs(wanted - found) <= 1e-6 * max(1.0, abs(wanted))
    return str(wanted).lower() == str(found).lower()
