"""At most one warm group of ranks: reused where it fits, replaced where it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.hardware import Environment, Gpu, GroupSpec
from perfsearch.core.knob import Value
from perfsearch.core.trial import Measurement, Outcome, Status
from perfsearch.metrics.throughput import peak_flops
from perfsearch.workers import launchers
from perfsearch.workers.failures import Failure
from perfsearch.workers.group import WorkerGroup
from perfsearch.workers.messages import TrialRequest, rank_log
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
        self._flops_per_sample: float | None = None

    def measure(
        self, spec: GroupSpec, request: TrialRequest, time_limit_s: float, fresh: bool = False
    ) -> Outcome:
        """Measure one configuration in a group of ``spec``; a failure is an outcome, too.

        Args:
            spec: processes that the configuration needs.
            request: what the ranks are to do.
            time_limit_s: seconds after which it is ended, start-up apart.
            fresh: whether processes are started anew, whatever is still warm.

        """
        fresh = fresh or not self._fits(spec)
        logs = Path(request.log_directory)
        if fresh:
            failure = self._replace(spec, request)
            if failure is not None:
                return _failed(failure, logs, fresh)
        assert self._group is not None
        group = self._group
        context = hardware.conditions(self._gpus, group.pids) if self._gpus else {}
        reply = group.run(request, time_limit_s)
        if not reply.alive or not group.alive:
            self._end_group()
        plain = _without_profile(request)
        if reply.failure is not None and reply.failure.while_profiling and request != plain:
            result = self.measure(spec, plain, time_limit_s)
            if result.measurement is not None:
                missing = {"close look": reply.failure.reason}
                result.measurement.environment["unsupported"] = missing
            return replace(result, fresh_process=fresh)
        if reply.failure is not None:
            return _failed(reply.failure, logs, fresh)
        context["devices"] = [asdict(gpu) for gpu in self._gpus]
        info = self._with_operations(group.info, reply.message["measurement"])
        return _succeeded(reply.message, info, request, fresh, context)

    def _with_operations(
        self, info: Mapping[str, Any], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is known of the job, with the operations that a profile counted, this or before.

        A job that states its own is believed.
        """
        counted = measured["bottleneck_evidence"].get("counted_flops")
        if counted:
            self._flops_per_sample = counted / measured["samples_per_step"]
        stated = info.get("flops_per_sample") or self._flops_per_sample
        return {**info, "flops_per_sample": stated}

    def _fits(self, spec: GroupSpec) -> bool:
        group = self._group
        return group is not None and group.alive and group.spec.key == spec.key

    def _replace(self, spec: GroupSpec, request: TrialRequest) -> Failure | None:
        self._end_group()
        environment = {**os.environ, **spec.env}
        launch = launchers.of(self._environment).launch(self._preload(environment))
        group = WorkerGroup(spec, self._environment.limits, launch, self._gpus)
        failure = group.start(Path(request.log_directory), request)
        if failure is None:
            self._group = group
        else:
            self.close()  # whatever was wrong, the next start begins from nothing
        return failure

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


def _without_profile(request: TrialRequest) -> TrialRequest:
    """The same, ended with the scored steps."""
    options = {name: value for name, value in request.recipe_options.items() if name != "examine"}
    return replace(request, detail="light", recipe_options=options)


def _failed(failure: Failure, logs: Path, fresh: bool) -> Outcome:
    log = rank_log(logs, failure.rank or 0)
    if failure.rank is None and not log.exists():
        log = logs / "launcher.log"
    return Outcome(failure.status, None, failure.reason, str(log), fresh)


def _succeeded(
    message: Mapping[str, Any],
    info: Mapping[str, Any],
    request: TrialRequest,
    fresh: bool,
    context: dict[str, Any],
) -> Outcome:
    measurement = Measurement(**message["measurement"])
    batch = request.samples_per_step
    if info.get("tokens_per_sample"):
        measurement.tokens_per_step = int(info["tokens_per_sample"]) * batch
    if info.get("flops_per_sample"):
        measurement.flops_per_step = float(info["flops_per_sample"]) * batch
    measurement.environment.update(context)
    if info.get("parameters"):
        measurement.environment["parameters"] = int(info["parameters"])
    cards, precision = context["devices"], str(info.get("precision", ""))
    measurement.environment["precision"] = precision
    peak = peak_flops(cards[0]["name"], precision) if cards else None
    if peak is not None:
        measurement.environment["peak_flops_per_s"] = peak
    status, reason = Status(message["status"]), str(message["reason"])
    if status is Status.OK:
        ignored = not_in_force(request.configuration, measurement.in_force)
        if ignored:
            status, reason = Status.NOT_APPLIED, "; ".join(ignored)
    log = rank_log(request.log_directory, 0)
    return Outcome(status, measurement, reason, str(log), fresh, extra={"info": dict(info)})


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
