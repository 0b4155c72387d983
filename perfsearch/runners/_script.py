"""An unchanged script, searched over starts of it in real processes (``workload=script``)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfsearch.config_options import ConfigError, build_options, option
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.mapping import Mapped, apply, parse_map, parse_map_file
from perfsearch.instrument.orders import Orders
from perfsearch.instrument.presets import preset
from perfsearch.instrument.report import without_effect
from perfsearch.parallel import nccl, torch_features
from perfsearch.run_knobs import plan as knob_plan
from perfsearch.runners import _script_export, _script_failures
from perfsearch.runners._ranks import threads_today
from perfsearch.runners._script_group import ScriptGone, ScriptGroup
from perfsearch.runners._script_knobs import (
    EFFECT_ORDER,
    ScriptSurroundings,
    declare,
    with_accumulation,
)
from perfsearch.runners._script_window import (
    EndedError,
    Start,
    add_loss,
    mean_loss,
    receive_steps,
    score,
    settle,
)
from perfsearch.runners.base import Outcome, Plan, Runner
from perfsearch.search.errors import BadInputError
from perfsearch.search.hints import Hints
from perfsearch.search.knob import Configuration, Knob, Numerics, Scope, Value, same_value
from perfsearch.search.narrow import SEARCH, KnobError, narrow
from perfsearch.search.space import Space
from perfsearch.search.suggest import nearest
from perfsearch.search.trial import Measurement, Purpose, Status, Trial
from perfsearch.workers import devices, registry
from perfsearch.workers.environment import Environment, detect

if TYPE_CHECKING:
    from perfsearch.config import Settings

_SAME_LOSS = 1e-5
"""Relative difference up to which steps that were trained twice are the same steps."""

_FIRST_STEP_SHARE = 1.0  # of limits.trial_s, for what a script does before its first step


@dataclass(frozen=True)
class ScriptOptions:
    """The ``workload.*`` keys of ``workload=script``.

    Attributes:
        command: the script, or the module's name, and its arguments.
        module: whether the first word of ``command`` is a module, as with ``python -m``.
        map: ``NAME=ARGUMENT``: the script takes the knob by this argument.
        map_file: ``FILE:KEY`` or ``NAME=FILE:KEY``: it reads the knob from this file.
        preset: arguments of a framework: ``hf-trainer``, ``lightning``, ``accelerate``,
            ``deepspeed``.
        silence: further arguments in trials, so that they write no checkpoints and no logs.
        samples_per_step: samples of a step over all ranks; ``null``: counted in the loader's
            batches.
        draws_in_loader: whether loading a sample draws random numbers, so that the number of loader
            processes changes what is trained; ``null``: found out where it can be.

    """

    command: tuple[str | int | float | bool, ...]
    module: bool = False
    map: tuple[str, ...] = ()
    map_file: tuple[str, ...] = ()
    preset: Literal["hf-trainer", "lightning", "accelerate", "deepspeed"] | None = None
    silence: tuple[str, ...] = ()
    samples_per_step: int | None = option(None, low=1)
    draws_in_loader: bool | None = None

    @property
    def words(self) -> list[str]:
        """The command as text."""
        return [str(w).lower() if isinstance(w, bool) else str(w) for w in self.command]

    def maps(self) -> tuple[list[Mapped], list[str]]:
        """Where knobs go, and the arguments that silence the script in trials."""
        maps = [parse_map(text) for text in self.map]
        maps += [parse_map_file(text) for text in self.map_file]
        named = {mapped.name for mapped in maps}
        silence = list(self.silence)
        if self.preset:
            known = preset(self.preset, self.words[1:])
            maps += [mapped for mapped in known.maps if mapped.name not in named]
            silence += known.silence
        return maps, silence


class Script(Runner):
    """Searches what can be changed in a script from outside, without a change to it.

    The script is started once before trial 0, to see what it builds; trial 0 goes on in that start.
    Step-scope knobs are changed between two steps of a running script, where training the same
    steps again gave the same losses; everything else starts it again.

    Args:
        family: the runner that was asked for.
        device: ``auto``, ``cpu`` or ``cuda``.
        knobs: ``runner.knobs``.
        options: the ``workload.*`` keys.
        environment: where and within which limits to run.
        batch: ``fixed`` or ``free``.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    @classmethod
    def from_settings(cls, settings: Settings) -> Script:
        """Build it from ``runner.*``, ``workload.*``, ``limits.*`` and the top-level keys."""
        from perfsearch.runners.ddp import environment_of

        name = settings.runner.name
        if settings.mode != "search":
            raise ConfigError(
                "mode", f"mode={settings.mode}: workload=script has only mode=search."
            )
        options = build_options(ScriptOptions, settings.workload.options, "workload")
        given = settings.runner.options
        try:
            environment = environment_of(settings)
            device = str(given.get("device", "auto"))
            return cls(name, device, given.get("knobs") or {}, options, environment, settings.batch)
        except ValueError as error:
            raise BadInputError(str(error)) from error

    def __init__(
        self,
        family: str,
        device: str,
        knobs: Mapping[str, Any],
        options: ScriptOptions,
        environment: Environment,
        batch: Literal["fixed", "free"] = "fixed",
    ) -> None:
        self.options = options
        self._family = family
        self._environment = environment
        self._wanted = dict(knobs)
        self._batch = batch
        self.hardware = detect(device, environment)
        self.devices = self.hardware.world_size
        if not options.words:
            raise ValueError(
                "workload.command=[]: give the script and its arguments, as in "
                "workload.command=[train.py,--epochs,'3']"
            )
        self._script, *self._arguments = options.words
        _require_script(self._script, options.module)
        self._maps, self._silence = options.maps()
        self._group: ScriptGroup | None = None
        self._start: Start | None = None
        self._in_process: dict[str, Value] = {}
        self._sound: bool | None = None
        self._failure: Outcome | None = None
        self._facts: Facts | None = None
        self._narrow()

    def _surroundings(self) -> ScriptSurroundings:
        return ScriptSurroundings(
            self.hardware,
            {**os.environ, **self._environment.variables},
            self._arguments,
            self._maps,
            threads_today(os.environ, self.hardware),
            self._facts,
            self.options.draws_in_loader,
            self._batch == "free",
            self._wanted,
            torch_features.wrapper_parameters(),
        )

    def _narrow(self) -> None:
        """Settle knobs, space and baseline from what is known of the script."""
        self._where = self._surroundings()
        declared, absent = declare(self._where)
        settings, self.left_out = _applicable(
            self._wanted, declared, absent, self._environment.numerics
        )
        searched, pinned = narrow(declared, settings, self._environment.numerics)
        self.pinned = {n: v for n, v in pinned.items() if n in settings}
        self.space = Space(searched)
        self.baseline = {knob.name: knob.default for knob in searched}
        self._by_name = {knob.name: knob for knob in declared}

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind, and start the script to see what it builds."""
        self._environment = replace(self._environment, run_dir=run_dir)
        registry.reap(run_dir)
        plan = Plan(
            number=0,
            time_limit_s=self._environment.limits.trial_s,
            log_directory=run_dir / "logs" / "0000",
        )
        self._failure = self._begin(self.baseline, plan)
        if self._failure is None:
            assert self._start is not None
            self._facts = self._start.facts
            self._narrow()
        elif self._failure.status is not Status.OOM:
            self.space, self.baseline = Space([]), {}  # nothing would get further than today's

    def _orders(
        self, configuration: Configuration, directory: Path
    ) -> tuple[Orders, list[str], dict[str, str]]:
        """What the ranks are told, the script's arguments, and the environment."""
        changed = self.changed(configuration)
        planned = knob_plan(changed, self._maps)
        arguments, told = apply(
            [*self._arguments, *self._silence], self._maps, planned.mapped, directory
        )
        variables = {"OMP_NUM_THREADS": str(threads_today(os.environ, self.hardware))}
        variables.update(planned.environment)
        orders = Orders(
            self._script, self.options.module, planned.objects, report=False, mapped=told
        )
        return orders, arguments, variables

    def changed(self, configuration: Configuration) -> dict[str, Value]:
        """The knobs that are not as the script has them, pinned ones and what follows included."""
        asked = {
            **{n: v for n, v in self.pinned.items() if v is not None},
            **{
                n: v
                for n, v in configuration.items()
                if n not in self.baseline or not same_value(v, self.baseline[n])
            },
        }
        return with_accumulation(asked, self._where)

    def _begin(self, configuration: Configuration, plan: Plan) -> Outcome | None:
        """Start the script and let it make two steps; return the failure, if it is one."""
        self._end()
        log = str(plan.log_directory / "rank0.log")
        orders, arguments, variables = self._orders(configuration, plan.log_directory / "files")
        group = ScriptGroup(
            orders,
            arguments,
            variables,
            self.hardware.nproc,
            self._environment,
            self.hardware.gpus,
            plan.log_directory,
        )
        self._group = group
        deadline = time.monotonic() + self._environment.limits.startup_s + plan.time_limit_s
        try:
            group.join()
            first = receive_steps(group, deadline - time.monotonic())
            _script_failures.require_ranks_together(first, self.hardware.world_size)
            start = Start(
                Facts(**first[0]["facts"]),
                first[0]["pulls"],
                why_not_again=first[0]["why_not_again"],
            )
            start.kept = self._keep(group)
            group.send({"op": "go"})
            second = receive_steps(group, max(0.0, deadline - time.monotonic()))
        except (ScriptGone, EndedError) as error:
            outcome = _script_failures.outcome(
                group, error, self.changed(configuration), self._maps
            )
            self._end(kill=True)
            return replace(outcome, log_path=outcome.log_path or log, fresh_process=True)
        except BaseException:
            self._end(kill=True)
            raise
        start.facts = Facts(**second[0]["facts"])
        pulls = {(a["pulls"], b["pulls"] - a["pulls"]) for a, b in zip(first, second, strict=True)}
        start.pulls_per_step = next(iter(pulls))[1] if len(pulls) == 1 else None
        start.seconds = [max(m["seconds"] for m in messages) for messages in (first, second)]
        add_loss(start, mean_loss(second))
        self._start = start
        self._in_process = self.changed(configuration)
        return None

    def _keep(self, group: ScriptGroup) -> str:
        """Have the ranks keep the point after the first step, where it may be gone back to."""
        knobs = self.space.knobs if self._facts is None else list(self._by_name.values())
        if self._sound is False or not any(k.scope is Scope.STEP for k in knobs):
            return "nothing is changed between two steps"
        group.send({"op": "keep"})
        limit_s = self._environment.limits.startup_s
        return next((m["reason"] for m in group.receive("kept", limit_s) if m["reason"]), "")

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Measure in the running script where that is sound, else in a new start of it."""
        if self._failure is not None and plan.purpose is Purpose.BASELINE and not plan.attempt:
            failure, self._failure = self._failure, None
            return failure
        deadline = time.monotonic() + plan.time_limit_s
        begin = time.monotonic()
        fresh = plan.fresh or not self._fits(configuration)
        if not fresh and not self._is_untouched(configuration):
            fresh = not self._go_back(configuration, deadline)
        if fresh:
            broken = self._begin(configuration, plan)
            if broken is not None:
                return broken
            deadline = time.monotonic() + plan.time_limit_s
        group, start = self._group, self._start
        assert group is not None and start is not None
        surroundings = (
            devices.conditions(self.hardware.gpus, group.pids) if self.hardware.gpus else {}
        )
        changed = self.changed(configuration)
        try:
            settle(group, plan, start, deadline)
            in_force = self._in_force(changed)
            measurement = score(group, plan, start, deadline, in_force)
        except (ScriptGone, EndedError) as error:
            outcome = _script_failures.outcome(group, error, changed, self._maps)
            self._end(kill=True)
            return replace(outcome, fresh_process=fresh)
        except BaseException:
            self._end(kill=True)
            raise
        start.seconds = []  # it has been measured: another configuration begins from the kept point
        measurement.environment = surroundings
        measurement.rewrap_seconds = max(
            0.0,
            time.monotonic()
            - begin
            - sum(measurement.step_seconds)
            - measurement.discarded_seconds,
        )
        return self._judged(measurement, changed, group, start, fresh)

    def _is_untouched(self, configuration: Configuration) -> bool:
        """Whether this very configuration has been started, and not been measured yet."""
        return (
            self._start is not None
            and bool(self._start.seconds)
            and self.changed(configuration) == self._in_process
        )

    def _judged(
        self,
        measurement: Measurement,
        changed: Mapping[str, Value],
        group: ScriptGroup,
        start: Start,
        fresh: bool,
    ) -> Outcome:
        log = str(group.log)
        if self.options.samples_per_step is not None:
            measurement.samples_per_step = self.options.samples_per_step
        elif not measurement.samples_per_step:
            return Outcome(
                Status.INVALID,
                None,
                "no batch of a DataLoader was seen, so that samples cannot be counted. Give "
                "workload.samples_per_step=N, the samples of a step over all ranks",
                log,
                fresh,
            )
        bad = next((v for v in start.losses or [] if not math.isfinite(v)), None)
        if bad is not None:
            return Outcome(Status.DIVERGED, measurement, f"the loss is {bad}", log, fresh)
        lost = without_effect(changed, start.facts)
        if lost:
            reason = "; ".join(lost.values())
            return Outcome(Status.NOT_APPLIED, measurement, reason, log, fresh)
        return Outcome(Status.OK, measurement, "", log, fresh)

    def _in_force(self, changed: Mapping[str, Value]) -> Any:
        planned = knob_plan(changed, self._maps)
        mapped = planned.mapped
        variables = {**os.environ, **planned.environment}
        of_nccl = nccl.read_back(variables, {n: changed[n] for n in changed if n in nccl.VARIABLES})
        return lambda facts: {**facts.values, **mapped, **of_nccl}

    def _fits(self, configuration: Configuration) -> bool:
        """Whether the running script can be given this configuration between two steps."""
        start = self._start
        if self._group is None or start is None:
            return False
        wanted, now = self.changed(configuration), self._in_process
        different = {
            n for n in wanted.keys() | now.keys() if not same_value(wanted.get(n), now.get(n))
        }
        if self._is_untouched(configuration):
            return True
        scopes = {
            self._by_name[n].scope if n in self._by_name else Scope.PROCESS for n in different
        }
        blocked = self._sound is False or start.kept or start.why_not_again
        return not blocked and start.pulls_per_step is not None and scopes <= {Scope.STEP}

    def _go_back(self, configuration: Configuration, deadline: float) -> bool:
        """Take the running script back to its first step under the configuration.

        The first time, the same configuration is trained again first: unless its losses are the
        ones that it had, nothing is ever changed in a running script.
        """
        group, start = self._group, self._start
        assert group is not None and start is not None
        try:
            if self._sound is None:
                before = list(start.losses or [])
                self._rewind(group, start, self._in_process, deadline)
                while len(start.losses or []) < len(before) and start.losses is not None:
                    group.send({"op": "go"})
                    messages = receive_steps(group, max(0.0, deadline - time.monotonic()))
                    add_loss(start, mean_loss(messages))
                self._sound = bool(before) and _same(before, start.losses or [])
                if not self._sound:
                    return False
            self._rewind(group, start, self.changed(configuration), deadline)
        except (ScriptGone, EndedError):
            self._end(kill=True)
            return False
        return True

    def _rewind(
        self, group: ScriptGroup, start: Start, knobs: dict[str, Value], deadline: float
    ) -> None:
        assert start.pulls_per_step is not None

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        # batches that a wrapper of the loader has taken in advance are used up by one more step
        group.send({"op": "rewind", "place": start.first_pulls - start.pulls_per_step})
        receive_steps(group, left())
        objects = knob_plan(knobs, self._maps).objects
        group.send({"op": "change", "knobs": objects})
        group.receive("changed", left())
        self._in_process = dict(knobs)
        start.losses, start.seconds = [], []
        group.send({"op": "go"})
        messages = receive_steps(group, left())
        start.seconds.append(max(m["seconds"] for m in messages))
        add_loss(start, mean_loss(messages))

    def identity(self) -> dict[str, str]:
        """Command, ranks, devices and versions: what a result holds for."""
        return {
            "workload": "script " + " ".join(self.options.words),
            "world_size": str(self.hardware.world_size),
            "gpu": self.hardware.device_name,
            "torch": torch_features.torch_version(),
            "nccl": torch_features.nccl_version() if self.hardware.gpus else "",
            "driver": devices.driver_version() if self.hardware.gpus else "",
        }

    def device_set(self) -> str:
        """``cpu``, or the UUIDs of the GPUs used."""
        return ",".join(sorted(gpu.uuid for gpu in self.hardware.gpus)) or "cpu"

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
        """What to do where the script does not run as it is."""
        return f"Try it without perfsearch: torchrun --nproc-per-node={self.hardware.nproc} " + (
            " ".join(self.options.words)
        )

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the command, the environment and the few lines that make the script the same."""
        return _script_export.write(
            self.changed(configuration),
            self._maps,
            self.hardware,
            threads_today(os.environ, self.hardware),
            [self._script, *self._arguments],
            self.options.module,
            directory,
        )

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """Only what is not as the script has it: the rest stays the script's own."""
        follows = {m.name for m in self._maps} - {k.name for k in self._by_name.values()}
        changed = self.changed(configuration)
        return {"knobs": {n: v for n, v in changed.items() if n not in follows}}

    def close(self) -> None:
        """End the script, and what an interrupt kept from becoming one."""
        self._end()
        registry.reap(self._environment.run_dir, grace_s=0.0)

    def _end(self, kill: bool = False) -> None:
        group, self._group, self._start = self._group, None, None
        if group is not None:
            group.end(kill)


def _same(before: Sequence[float], again: Sequence[float]) -> bool:
    return len(before) == len(again) and all(
        abs(a - b) <= _SAME_LOSS * max(1.0, abs(a)) for a, b in zip(before, again, strict=True)
    )


def _require_script(script: str, module: bool) -> None:
    if not module and not Path(script).is_file():
        raise ValueError(
            f"workload.command=[{script},...]: there is no such script. Looked from {Path.cwd()}"
        )


def _applicable(
    wanted: Mapping[str, Any],
    declared: Sequence[Knob],
    absent: Mapping[str, str],
    allowed: Numerics,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of ``runner.knobs`` there is in this script, and why the rest is left out.

    The option files name knobs of other workloads too; those are left out silently as long as they
    have a value that changes nothing.
    """
    by_name = {knob.name: knob for knob in declared}
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, setting in wanted.items():
        if name in by_name:
            too_much = by_name[name].numerics.rank > allowed.rank
            if too_much and setting == SEARCH:
                left_out[name] = f"it is {by_name[name].numerics} and numerics={allowed}"
            else:
                settings[name] = setting
        elif name in absent or name in _OF_WORKLOADS:
            left_out[name] = absent.get(name, _OF_WORKLOADS_REASON)
        else:
            everything = {*by_name, *absent}
            raise KnobError(f"runner.knobs.{name}: no such knob. {nearest(name, everything)}")
    for name, knob in by_name.items():
        if name not in wanted and knob.numerics.rank <= allowed.rank and len(knob.values) != 1:
            settings[name] = SEARCH
    return settings, left_out


_OF_WORKLOADS_REASON = "it cannot be given to a script from outside"
_OF_WORKLOADS = frozenset(
    {
        "hierarchical_group_size", "compile_mode", "channels_last", "zero_stage", "micro_batch",
        "gradient_accumulation", "activation_checkpointing", "blocks_per_unit", "forward_prefetch",
        "backward_prefetch", "gradient_sync_each", "shard_group_size", "reshard_group_size",
        "cpu_offload", "mixed_precision",
    }
)  # fmt: skip
"""Knobs that the runners' option files name and only built-in or custom workloads have."""
