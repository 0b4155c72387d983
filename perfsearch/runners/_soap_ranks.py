"""Requests of ``runner=soap`` to its ranks: describe the job, or train a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Status
from perfsearch.runners import _ranks
from perfsearch.runners._soap_options import SoapOptions
from perfsearch.runners.base import Outcome, Plan
from perfsearch.workers.environment import Environment, Hardware
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.pool import Pool
from perfsearch.workloads.spec import WorkloadSpec


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

    def train(self, strategy: str, replays: bool, plan: Plan) -> Outcome:
        """Train the text of a strategy as planned, and time its operators afterwards.

        A strategy whose trial had to be repeated without that is not asked for it again.
        """
        options = {"cuda_graph": replays, "examine": strategy not in self._not_examined}
        outcome = self._ask("soap_step", {"plan": strategy}, options, plan)
        found = outcome.measurement
        if outcome.status is Status.OK and found and "operators" not in found.environment:
            self._not_examined.add(strategy)
        return outcome

    def describe(
        self,
        directory: Path,
        known: list[str],
        machine: Path | None,
        devices: int,
        options: SoapOptions,
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
        plan = Plan(
            number=-1,
            time_limit_s=self._environment.limits.trial_s,
            scored_steps=(1, 1),
            scored_seconds=0.0,
            log_directory=self._environment.run_dir / "logs" / "profile",
        )
        outcome = self._ask("soap_profile", {}, wanted, plan)
        if outcome.status is not Status.OK:
            raise BadInputError(
                f"runner=soap: the job could not be described: {outcome.reason}. Full log: "
                f"{outcome.log_path}"
            )

    def _ask(
        self, recipe: str, configuration: dict[str, Any], options: dict[str, Any], plan: Plan
    ) -> Outcome:
        assert self._workload.global_batch is not None
        request = TrialRequest(
            serial=0,
            recipe=recipe,
            configuration=configuration,
            samples_per_step=self._workload.global_batch,
            recipe_options=options,
        )
        spec = _ranks.group_spec(self._environment, self._hardware, self._workload, {})
        counted = self._workload.samples_per_step if recipe == "soap_step" else None
        return _ranks.measure(self._pool, spec, request, plan, counted)

    def close(self) -> None:
        """End them."""
        self._pool.close()
