"""An unchanged script, measured in starts of it in real processes (``workload=script``)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfsearch.config_options import ConfigError, build_options
from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Scope, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.orders import Orders
from perfsearch.instrument.report import without_effect
from perfsearch.parallel import nccl, torch_features
from perfsearch.run_knobs import plan as sort_knobs
from perfsearch.runners import _script_export, _script_failures, _script_space
from perfsearch.runners._script_group import ScriptGone
from perfsearch.runners._script_knobs import EFFECT_ORDER
from perfsearch.runners._script_objects import ScriptSurroundings
from perfsearch.runners._script_options import ScriptOptions
from perfsearch.runners._script_runs import Runs
from perfsearch.runners._script_window import EndedError, validation_lines
from perfsearch.runners._script_wishes import Wishes
from perfsearch.runners.base import Outcome, Plan, Runner, environment_of
from perfsearch.workers import devices, registry
from perfsearch.workers.environment import Environment, detect, threads_today

if TYPE_CHECKING:
    from perfsearch.config import Settings


_NO_WISHES = Wishes()


class Script(Runner):
    """Searches what can be changed in a script from outside, without a change to it.

    The script is started once before trial 0, to see what it builds; trial 0 goes on in that start.
    Step-scope knobs are changed between two steps of a running script, where training the same
    steps again gave the same losses; everything else starts it again.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        knobs: ``runner.knobs``.
        options: the ``workload.*`` keys.
        environment: where and within which limits to run.
        batch: ``fixed`` or ``free``.
        wishes: of its timings.

    Attributes:
        left_out: knobs that are not searched although they were asked for by default, and why.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    @classmethod
    def from_options(cls, settings: Settings, device: str, knobs: Mapping[str, Any]) -> Script:
        """Build it for the runner that was asked for.

        Args:
            settings: everything that the user has set.
            device: ``runner.device``.
            knobs: ``runner.knobs``, as the runner has understood them.

        Raises:
            BadInputError: with the message for the user.

        """
        if settings.mode not in ("search", "profile"):
            raise ConfigError(
                "mode",
                f"mode={settings.mode}: workload=script has only mode=search and mode=profile.",
            )
        options = build_options(ScriptOptions, settings.workload.options, "workload")
        if settings.runner.name == "zero":
            knobs = _script_space.without_file(knobs)
        try:
            return cls(
                device,
                knobs,
                options,
                environment_of(settings),
                settings.batch,
                Wishes.of(settings),
            )
        except ValueError as error:
            raise BadInputError(str(error)) from error

    def __init__(
        self,
        device: str,
        knobs: Mapping[str, Any],
        options: ScriptOptions,
        environment: Environment,
        batch: Literal["fixed", "free"] = "fixed",
        wishes: Wishes = _NO_WISHES,
    ) -> None:
        self._wishes = wishes
        self.options = options
        self._environment = environment
        self.hardware = detect(device, environment)
        self.devices = self.hardware.world_size
        self._threads = threads_today(os.environ, self.hardware)
        script, *arguments = options.words
        maps, silence = options.maps()
        self._where = ScriptSurroundings(
            self.hardware,
            {**os.environ, **environment.variables},
            arguments,
            maps,
            self._threads,
            None,
            options.draws_in_loader,
            batch == "free",
            dict(knobs),
            torch_features.wrapper_parameters(),
        )
        self._runs = Runs(
            Orders(script, options.module),
            [*arguments, *silence],
            maps,
            {"OMP_NUM_THREADS": str(self._threads)},
            self.hardware,
            environment,
        )
        self._failure: Outcome | None = None
        self._settle(None)

    def _settle(self, facts: Facts | None) -> None:
        """Settle knobs, space and baseline from what is known of the script."""
        self._facts = facts
        self._where = replace(self._where, facts=facts)
        self._known = _script_space.settle(self._where, self._environment.numerics)
        self.space, self.baseline = self._known.space, self._known.baseline
        self.pinned, self.left_out = self._known.pinned, self._known.left_out

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind, and start the script to see what it builds."""
        self._environment = replace(self._environment, run_dir=run_dir)
        self._runs.environment = self._environment
        registry.reap(run_dir)
        plan = Plan(
            number=0,
            time_limit_s=self._environment.limits.trial_s,
            log_directory=run_dir / "logs" / "0000",
        )
        knobs = self._changed(self.baseline)
        self._failure = self._runs.begin(knobs, plan, self._keeps)
        start, given = self._runs.start, self.options.samples_per_step
        if start is not None and start.took_no_batch and given is None:
            self._failure = self._runs.failure(EndedError(_script_failures.UNCOUNTED), knobs)
        if self._failure is None:
            assert self._runs.start is not None
            self._settle(self._runs.start.facts)
        elif self._failure.status is Status.OOM:
            self._settle(Facts.left(plan.log_directory))  # a smaller batch may fit
        else:
            self.space, self.baseline = Space([]), {}  # nothing would get further than today's
        unheeded = self._known.unheeded(self._where.wanted, self.options.names_mapped)
        self.remarks = self._wishes.remarks(bool(self.hardware.gpus), self._facts, unheeded)

    @property
    def _keeps(self) -> bool:
        """Whether anything may be changed between two steps."""
        return self._wishes.searches and any(knob.scope is Scope.STEP for knob in self.space.knobs)

    def _changed(self, configuration: Configuration) -> dict[str, Value]:
        return self._known.changed(configuration)

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Measure in the running script where that is sound, else in a new start of it."""
        if self._failure is not None and plan.purpose is Purpose.BASELINE and not plan.attempt:
            failure, self._failure = self._failure, None
            return replace(failure, fresh_process=True)
        begin = time.monotonic()
        deadline = begin + plan.time_limit_s
        runs, knobs = self._runs, self._changed(configuration)
        untouched = not plan.fresh and runs.is_waiting_with(knobs)
        only_steps = self._known.scope(runs.differing(knobs)) <= {Scope.STEP}
        goes_on = untouched or (
            only_steps and not plan.fresh and runs.go_back(knobs, plan, deadline)
        )
        fresh = not goes_on
        if fresh:
            goes_back = self._keeps and plan.purpose is not Purpose.CONFIRM  # each has a start
            failed = runs.begin(knobs, plan, goes_back)
            if failed is not None:
                return replace(failed, fresh_process=True)
            deadline = time.monotonic() + plan.time_limit_s
        ready_s = time.monotonic() - begin
        group, start = runs.group, runs.start
        assert group is not None and start is not None
        gpus = self.hardware.gpus
        surroundings = devices.conditions(gpus, group.pids) if gpus else {}
        try:
            measurement = runs.score(plan, deadline, self._in_force(knobs))
        except (ScriptGone, EndedError) as error:
            if isinstance(error, EndedError) and not (fresh or untouched):
                runs.end(kill=True)  # what was left of it was too short; a whole start may do
                return self.measure(configuration, replace(plan, fresh=True))
            return replace(runs.failure(error, knobs), fresh_process=fresh)
        except BaseException:
            runs.end(kill=True)
            raise
        measurement.environment.update(surroundings)
        measurement.rewrap_seconds = 0.0 if fresh else ready_s
        if self.options.samples_per_step is not None:
            measurement.samples_per_step = self.options.samples_per_step
        lost = without_effect(knobs, start.facts)
        status, reason = _script_failures.judge(measurement, start.losses, lost)
        return Outcome(
            status,
            None if status is Status.INVALID else measurement,
            reason,
            str(group.log),
            fresh,
        )

    def _in_force(self, knobs: Mapping[str, Value]) -> dict[str, Value]:
        """What no library can be asked for: arguments of the script, variables of NCCL."""
        planned = sort_knobs(knobs, self._where.maps)
        environ = {**os.environ, **planned.environment}
        of_nccl = {name: knobs[name] for name in knobs if name in nccl.VARIABLES}
        return {**planned.mapped, **nccl.read_back(environ, of_nccl)}

    def identity(self) -> dict[str, str]:
        """Command, ranks, devices and versions: what a result holds for."""
        return {
            "workload": "script " + " ".join(self.options.words),
            **self.hardware.identity(),
        }

    def device_set(self) -> str:
        """``cpu``, or the UUIDs of the GPUs used."""
        return self.hardware.device_set

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """The order of expected effects; the memory of a device."""
        names = self.space.by_name
        order = [n for n in EFFECT_ORDER if n in names]
        return Hints(
            baseline=dict(self.baseline),
            effect_order=(*order, *(n for n in names if n not in order)),
            memory_limit_gib=self.hardware.memory_gib,
        )

    def advice(self, trials: Sequence[Trial]) -> str:
        """What to try where the script does not run as it is."""
        command = ["-m"] if self.options.module else []
        command += self.options.words
        return "See whether it runs alone: torchrun --standalone " + " ".join(
            [f"--nproc-per-node={self.hardware.nproc}", *command]
        )

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the command, the environment and the few lines that make the script the same."""
        return _script_export.write(
            self._changed(configuration),
            self._where.maps,
            self.hardware,
            self._threads,
            self.options.words,
            self.options.module,
            list(self._where.facts.wrappers) if self._where.facts is not None else [],
            directory,
        )

    def closing_lines(self, configuration: Configuration, trials: Sequence[Trial]) -> list[str]:
        """What the baseline's window had besides training; what the best asks of the script."""
        return validation_lines(trials) + _script_export.promises(self._changed(configuration))

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """Only what is not as the script has it: the rest stays the script's own."""
        changed = self._changed(configuration)
        return {"knobs": {n: v for n, v in changed.items() if n in self._known.declared}}

    def close(self) -> None:
        """End the script, and what an interrupt kept from becoming one."""
        self._runs.close()
        registry.reap(self._environment.run_dir, grace_s=0.0)
