"""An unchanged script, measured in starts of it in real processes (``workload=script``)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from perfsearch.config.options import ConfigError, build_options
from perfsearch.config.schema import MetricsSettings
from perfsearch.core import command, hardware, secrets
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.hardware import Environment, detect_hardware, on_cores, threads_today
from perfsearch.core.hints import Hints
from perfsearch.core.journal import JOURNAL, measured_as, read
from perfsearch.core.knob import Configuration, Knob, Numerics, Scope, Value, same_value
from perfsearch.core.narrow import SEARCH, KnobError, is_auto, narrow, on_device
from perfsearch.core.objective import Objective
from perfsearch.core.option import option
from perfsearch.core.space import Space
from perfsearch.core.trial import PERTURBED, Measurement, Outcome, Purpose, Status, Trial
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.launch import LaunchConfig
from perfsearch.instrument.outside import cautions
from perfsearch.instrument.report import without_effect
from perfsearch.instrument.user_files import UserFiles, named
from perfsearch.knobs import by_name as every_knob
from perfsearch.knobs import effect_order, nccl, transport
from perfsearch.knobs.arguments import BatchArguments, batch_arguments
from perfsearch.knobs.base import Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.ddp import BUCKET_CAP
from perfsearch.knobs.fsdp import BACKWARD_PREFETCH, CPU_OFFLOAD, FORWARD_PREFETCH
from perfsearch.knobs.loader import WORKERS
from perfsearch.knobs.model import COMPILE
from perfsearch.knobs.optimizer import IMPLEMENTATION
from perfsearch.knobs.process import THREADS, THREADS_VARIABLE
from perfsearch.knobs.script import ScriptJob, declare
from perfsearch.knobs.transport import Mapped, current, gather
from perfsearch.knobs.zero import BLOCKS_PER_UNIT, MIXED_PRECISION, RESHARD_GROUP, SYNC_EACH
from perfsearch.metrics.diagnosis import MADE_AGAIN
from perfsearch.runners._ranks import told_shares
from perfsearch.runners._script import export, window
from perfsearch.runners._script.group import EndedError
from perfsearch.runners._script.start import Runs
from perfsearch.runners._script.ways import Finder, Way
from perfsearch.runners._script.window import Start, made_again_lines, validation_lines
from perfsearch.runners.base import (
    Advises,
    ClosingLines,
    HoldsDevices,
    KeepsFiles,
    MeasuresBeside,
    Plan,
    Runner,
    StartsScripts,
    Turns,
    alone,
    environment_of,
)
from perfsearch.tracking import store_files
from perfsearch.workers import processes
from perfsearch.workers.group import GroupGone

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings


_OTHER_BATCH = math.log(1.25)
"""The last batch of an epoch may be smaller; another micro-batch makes a half more at the least."""

_FEW_SHAPES = 2
"""Shapes that batches have which are all alike but for the last of an epoch."""


class Script(
    Runner, HoldsDevices, MeasuresBeside, StartsScripts, Advises, ClosingLines, KeepsFiles
):
    """Searches what can be changed in a script from outside, without a change to it.

    The script is started once before trial 0, to see what it builds; trial 0 goes on in that start.
    Step-scope knobs are changed between two steps of a running script, where training the same
    steps again gave the same losses; everything else starts it again.

    Several starts run at a time only as long as none of them changes files of the user's: each
    might read what another has written.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        knobs: ``runner.knobs``.
        options: the ``workload.*`` keys.
        environment: where and within which limits to run.
        batch: ``fixed`` or ``free``.
        timings: what is asked of its timings; by default nothing.
        stores: files and directories beside the run's own that perfsearch writes to.
        files: keeps what starts change of the user's files; one of its own by default.

    Attributes:
        left_out: knobs that are not searched although they were asked for by default, and why.

    Raises:
        ValueError: a key has a value that cannot work here; nothing was started.

    """

    unseen = (
        "the script was not started: what it builds decides which of these knobs it has, and what "
        "their values are today"
    )

    @dataclass(frozen=True)
    class Options:
        """The ``workload.*`` keys of ``workload=script``.

        Attributes:
            command: the script, or the module's name, and its arguments.
            module: whether the first word of ``command`` is a module, as with ``python -m``.
            map: ``NAME=ARGUMENT``: the script takes the knob by this argument.
            map_file: ``FILE:KEY`` or ``NAME=FILE:KEY``: it reads the knob from this file.
            preset: arguments of a framework: ``hf-trainer``, ``lightning``, ``accelerate``,
                ``deepspeed``.
            silence: further arguments in trials, such as those that keep loggers from uploading.
            samples_per_step: samples of a step over all ranks; ``null``: counted by what the loader
                fetches for its batches, or, where that is not known, steps/s are scored.
            draws_in_loader: whether loading a sample draws random numbers, so that the number of
                loader processes changes what is trained; ``null``: found out where it can be.
            import_once: whether what the script imports is imported once, in a process that later
                starts are forked from; ``false``: each start imports it anew.

        """

        command: tuple[str | int | float | bool, ...]
        module: bool = False
        map: tuple[str, ...] = ()
        map_file: tuple[str, ...] = ()
        preset: Literal["hf-trainer", "lightning", "accelerate", "deepspeed"] | None = None
        silence: tuple[str, ...] = ()
        samples_per_step: int | None = option(None, low=1)
        draws_in_loader: bool | None = None
        import_once: bool = True

        def __post_init__(self) -> None:
            if not self.command:
                raise ConfigError(
                    "workload.command",
                    "workload.command=[]: give the script and its arguments, as in "
                    "workload.command=[train.py,--epochs,'3']",
                )
            if not self.module and not Path(self.words[0]).is_file():
                raise ConfigError(
                    "workload.command",
                    f"workload.command=[{self.words[0]},...]: there is no such script. Looked from "
                    f"{Path.cwd()}",
                )

        @property
        def words(self) -> list[str]:
            """The command as text, whole."""
            words = [str(w).lower() if isinstance(w, bool) else str(w) for w in self.command]
            return secrets.filled(words, os.environ, "workload.command")

        @property
        def names_mapped(self) -> list[str]:
            """Knobs that the user maps, those of a preset apart."""
            return [mapped.name for mapped in gather(self.map, self.map_file, None, ())[0]]

        def found(self) -> BatchArguments:
            """Where its own source shows that its batch goes, unless the user says anything."""
            named = {MICRO_BATCH.name, ACCUMULATION.name} & {*self.names_mapped}
            if self.module or self.preset or named:
                return BatchArguments()
            return batch_arguments(self.words[0], self.words[1:])

        def maps(self) -> tuple[list[Mapped], list[str]]:
            """Where knobs go, and the arguments that silence the script in trials.

            Raises:
                BadInputError: a map has a wrong form, or its file cannot be read.

            """
            maps, silence = gather(self.map, self.map_file, self.preset, self.words[1:])
            return maps, [*self.silence, *silence]

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
        options = build_options(cls.Options, settings.workload.options, "workload")
        if settings.runner.name == "zero":
            knobs = without_file(knobs)
        try:
            made = cls(
                device,
                knobs,
                options,
                environment_of(settings),
                settings.batch,
                TimingOptions.of(settings),
                store_files(settings),
            )
        except ValueError as error:
            raise BadInputError(str(error)) from error
        made.keep(settings)
        return made

    def __init__(
        self,
        device: str,
        knobs: Mapping[str, Any],
        options: Options,
        environment: Environment,
        batch: Literal["fixed", "free"] = "fixed",
        timings: TimingOptions | None = None,
        stores: Sequence[Path] = (),
        files: UserFiles | None = None,
    ) -> None:
        super().__init__(options, environment)
        secrets.learn(options.words)
        self._stores = stores
        self.files = files or UserFiles(directory=environment.directory or Path.cwd())
        self._timings = timings or TimingOptions()
        whole = detect_hardware(device, environment)
        self._ways = Finder(environment.nproc, whole)
        self.lanes = len(whole.lanes) or 1
        self._hardware_of(self._ways.way)
        arguments = options.words[1:]
        maps, silence = options.maps()
        self._found = BatchArguments() if batch == "free" else options.found()
        self._samples_today = 0
        self._silence = silence
        self._counts_samples = True
        self.cautions = cautions(options.words[0], options.module, arguments)
        self._where = ScriptJob(
            self.hardware,
            {**os.environ, **environment.variables},
            hardware.wrapper_parameters(),
            self._threads,
            draws_in_loader=options.draws_in_loader,
            facts=None,
            arguments=arguments,
            maps=[*maps, *self._found.maps],
            free=batch == "free",
            wanted=on_device(
                knobs,
                {name: record.default for name, record in every_knob.items()},
                self.hardware.device == "cuda",
            ),
        )
        self._runs = self._make_runs()
        self._others: list[Runs] = []
        self._lane_locks = [threading.Lock() for _ in range(self.lanes)]
        self._met = ""
        self._broken_off = False
        self._failure: Outcome | None = None
        self._started_s = 0.0
        self._settle(None)
        self._pins = self._known.changed(self.baseline)

    def _hardware_of(self, way: Way) -> None:
        """Take note of what the script runs on, started this way."""
        whole = self._ways.hardware
        self.hardware = replace(whole, nproc=way.ranks, gpus=whole.gpus[: way.ranks])
        self.devices = self.hardware.world_size
        self._threads = threads_today(os.environ, self.hardware)

    def _make_runs(self, lane: int = 0) -> Runs:
        script, *arguments = self.options.words
        variables = {**THREADS.variables(self._threads), **self.environment.variables}
        there = self.hardware
        if there.lanes:
            share = there.lanes[lane]
            there = replace(there, gpus=share.gpus[: there.nproc])
            variables |= share.variables
        return Runs(
            LaunchConfig(script, self.options.module),
            [*arguments, *self._silence],
            self._where.maps,
            variables,
            there,
            self.environment,
            self._ways.way,
            self.files,
            self.options.import_once,
        )

    def _start_this_way(self) -> None:
        """Have starts be as the finder of ways has it now."""
        self._runs.close()
        self._hardware_of(self._ways.way)
        self._where = replace(self._where, machine=self.hardware, threads=self._threads)
        self._runs = self._make_runs()
        self._settle(None)

    def _settle(self, facts: Facts | None) -> None:
        """Settle knobs, space and baseline from what is known of the script."""
        self._facts = facts
        self._where = replace(self._where, facts=facts)
        self._known = sort_script_knobs(self._where, self.environment.numerics)
        self.baseline, self.pinned = self._known.baseline, self._known.pinned
        self.left_out, self.declared = self._known.left_out, self._known.declared
        self.space = self.ruled(self._known.space)

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind, and start the script to see what it builds."""
        super().open(run_dir)
        self._runs.environment = self.environment
        processes.reap_groups(run_dir)
        self.files.own = [run_dir, *self.files.own, *self._stores]
        undone = self.files.open()
        plan = Plan(
            number=0,
            time_limit_s=self.environment.limits.trial_s,
            log_directory=run_dir / "logs" / "0000",
        )
        before = measured_as(*read(run_dir / JOURNAL)) if (run_dir / JOURNAL).exists() else {}
        if before and self._ways.asked is None:  # its other trials were started so
            self._ways.known = Way.from_identity(before)
            self._start_this_way()
        begin = time.monotonic()
        with on_cores(self._cores(0)):
            remarks = [*undone, *self._begin(plan)]
        self._started_s = time.monotonic() - begin
        self._others = [self._make_runs(lane) for lane in range(1, self.lanes)]
        if self._failure is None:
            start = self._runs.start
            assert start is not None
            self._settle(start.facts)
            remarks += self._count_samples(start)
            remarks += self._see_whose_batch(start)
        elif self._failure.status is Status.OOM:
            self._settle(Facts.left(plan.log_directory))  # a smaller batch may fit
        else:
            self.space, self.baseline = Space([]), {}  # nothing would get further than today's
            self.start_failure = f"{self._failure.status}, {self._failure.reason}"
            self.start_failed_from_outside = self._failure.status.is_from_outside
        unsupported = self._known.unsupported(self._where.wanted, self.options.names_mapped)
        remarks += self._timings.remarks(bool(self.hardware.gpus), self._facts, unsupported)
        if self._timings.searches and self._facts is not None:
            remarks += self._known.left_out_lines(self._where.wanted, unsupported)
        self.remarks = [*remarks, *told_shares(self.hardware)]

    def _begin(self, plan: Plan) -> list[str]:
        """Start the script the way that it is meant to be; what to say of how that was found."""
        remarks: list[str] = []
        again = True
        while True:
            knobs = self._changed(self.baseline)
            self._failure = self._runs.begin(knobs, plan, self._keeps)
            if self._failure is None:
                return remarks
            if self._failure.status.is_from_outside and again:
                # A later attempt at the baseline may well run, but the space is settled by now.
                again = False
                remarks.append(f"warning: first start: {self._failure.reason}; starting it again")
                continue
            why = self._ways.other(self._failure, self._runs.apart, self._runs.made)
            if not why:
                return remarks
            remarks.append(why)
            self._start_this_way()

    def _count_samples(self, start: Start) -> list[str]:
        """Settle whether samples are counted, and so what the rate is one of; what to say of it."""
        self._counts_samples = self.options.samples_per_step is not None or start.counts_samples
        if self._counts_samples:
            return []
        why = window.NO_BATCH if start.took_no_batch else window.NO_SAMPLES
        give = command.given().key("workload.samples_per_step=N")
        if self._where.free and MICRO_BATCH.name in self.space.by_name:
            reason = (
                f"{why}, so that samples cannot be counted, and with batch=free steps of different "
                f"batches are compared. Give {give}, the samples of a step over all ranks today"
            )
            self._failure = self._runs.failure(EndedError(reason), {})
            return []
        return [
            f"warning: {why}, so that samples cannot be counted: what is scored is steps/s. "
            f"{give}, the samples of a step over all ranks, has samples/s told"
        ]

    def _see_whose_batch(self, start: Start) -> list[str]:
        """Leave out the options that were found, unless they are a pass's; what to say of them.

        With one pass a step it could only get smaller, and slower.
        """
        self._samples_today = start.samples
        today, found = self.options.samples_per_step or start.samples, self._found
        if not found.maps:
            return []
        share = found.share * self.hardware.world_size
        is_another = today != share if today else not found.is_certain
        if is_another or found.accumulation == 1:
            others = [mapped for mapped in self._where.maps if mapped not in found.maps]
            self._where, self._found = replace(self._where, maps=others), BatchArguments()
            self._settle(start.facts)
            return []
        if MICRO_BATCH.name not in self.space.by_name:
            return []
        off = command.given().key(f"runner.knobs.{MICRO_BATCH.name}=null")
        return [f"searched at the same global batch: {found}, options of the script. Off: {off}"]

    def _of_another_batch(self, start: Start, knobs: Mapping[str, Value]) -> str:
        """Why a step does not train as many samples as today's; empty where it does."""
        today = self._samples_today or self._found.share * self.hardware.world_size
        if self._where.free or MICRO_BATCH.name not in knobs or not (today and start.samples):
            return ""
        if abs(math.log(start.samples / today)) < _OTHER_BATCH:
            return ""
        maps = " and ".join(
            f"{mapped.name} ({mapped})"
            for mapped in self._where.maps
            if mapped.name in (MICRO_BATCH.name, ACCUMULATION.name)
        )
        off = command.given().key(f"runner.knobs.{MICRO_BATCH.name}=null")
        return (
            f"its steps train {start.samples} samples, today's {today}: {maps} do not multiply to "
            f"them. Search without them: {off}"
        )

    def _samples(self, counted: int | None, knobs: Mapping[str, Value]) -> int | None:
        """Samples of a step over all ranks, with these knobs."""
        given: int | None = self.options.samples_per_step
        if given is None:
            return counted if self._counts_samples else None
        micro = MICRO_BATCH.of(knobs)
        if micro is None or ACCUMULATION.name in knobs:
            return given
        return round(given * int(micro) / int(self._known.declared[MICRO_BATCH.name].default or 1))

    @property
    def _keeps(self) -> bool:
        """Whether anything may be changed between two steps."""
        return self._timings.searches and any(knob.scope is Scope.STEP for knob in self.space.knobs)

    def _changed(self, configuration: Configuration) -> dict[str, Value]:
        # A start that was made to see what the script has built had the pinned knobs in force, so
        # that they look as if they were the script's own.
        pins = {name: v for name, v in self._pins.items() if name in self._known.pinned}
        return {**pins, **self._known.changed(configuration)}

    def _cores(self, lane: int) -> Sequence[int]:
        """CPU cores of a lane; empty: all of them."""
        return self.hardware.lanes[lane].cores if self.hardware.lanes else ()

    def why_alone(self) -> str:
        """See ``MeasuresBeside``."""
        changed = self.files.changed_by_now()
        if not (changed or self._met):
            return ""
        return (
            f"starts of the script change {named(changed) or self._met} here, and each of several "
            "at a time might read what another has written"
        )

    def break_off(self) -> None:
        """Kill the processes of every start that is under way."""
        self._broken_off = True
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Measure in the running script where that is sound, else in a new start of it."""
        if self.lanes == 1:
            return alone(self.measure_in_turns(configuration, plan))
        runs = [self._runs, *self._others][plan.lane]
        with self._in_lane(plan) as is_alone, on_cores(self._cores(plan.lane)):
            if self._broken_off:
                return Outcome(Status.INFRASTRUCTURE, reason="the search was broken off")
            if runs.sound is None:
                runs.sound = self._runs.sound  # it is the same script
            outcome = alone(self._measure(configuration, plan, runs))
            self._met = self._met or named(self.files.changed_by_now())
            if is_alone or not self._met:
                return outcome
            runs.end(kill=outcome.status is not Status.OK)
        reason = f"{self._met} changed while another start of the script ran, which may read it"
        return Outcome(Status.INFRASTRUCTURE, reason=reason, log_path=outcome.log_path)

    @contextmanager
    def _in_lane(self, plan: Plan) -> Iterator[bool]:
        """Keep what must not run at the same time apart.

        Yields:
            Whether no other start is there meanwhile.

        """
        while True:
            is_alone = bool(self._met) or plan.purpose not in (Purpose.SEARCH, Purpose.BESIDE)
            with ExitStack() as stack:
                for lock in self._lane_locks if is_alone else [self._lane_locks[plan.lane]]:
                    stack.enter_context(lock)
                if self._met and not is_alone:
                    continue
                for lane, runs in enumerate([self._runs, *self._others]):
                    if is_alone and lane != plan.lane:
                        runs.end()
                yield is_alone
                return

    def measure_in_turns(self, configuration: Configuration, plan: Plan) -> Turns[Outcome]:
        """As ``measure``, giving way to other scripts between its windows."""
        return self._measure(configuration, plan, self._runs)

    def _measure(self, configuration: Configuration, plan: Plan, runs: Runs) -> Turns[Outcome]:
        """The same in the starts of one lane."""
        if self._failure is not None and plan.purpose is Purpose.BASELINE and not plan.attempt:
            failure, self._failure = self._failure, None
            return replace(failure, fresh_process=True)
        begin = time.monotonic()
        deadline = begin + plan.time_limit_s
        started_s, self._started_s = self._started_s, 0.0
        knobs = self._changed(configuration)
        untouched = not (plan.fresh or plan.perturbed) and runs.is_waiting_with(knobs)
        only_steps = self._known.scope(runs.differing(knobs)) <= {Scope.STEP}
        goes_on = untouched or (
            only_steps and not plan.fresh and runs.go_back(knobs, plan, deadline)
        )
        fresh = not goes_on
        if fresh:
            once = plan.purpose is Purpose.CONFIRM or plan.perturbed
            goes_back = self._keeps and not once
            failed = runs.begin(knobs, plan, goes_back)
            if failed is not None:
                return replace(failed, fresh_process=True)
            deadline = time.monotonic() + plan.time_limit_s
        ready_s = time.monotonic() - begin
        group, start = runs.group, runs.start
        assert group is not None and start is not None
        gpus = runs.hardware.gpus
        conditions = hardware.conditions(gpus, group.pids | self._paused(plan)) if gpus else {}
        try:
            measurement = yield from runs.score(plan, deadline, self._in_force(knobs))
            if untouched and plan.purpose is Purpose.BASELINE and start.shapes > _FEW_SHAPES:
                self._compare_with_steps_made_again(measurement, knobs, plan, deadline)
        except (GroupGone, EndedError) as error:
            failed = replace(runs.failure(error, knobs), fresh_process=fresh)
            if fresh or untouched or self._is_cut_off(failed, plan) or self._broken_off:
                return failed
            # whatever came after what was left of it: only a whole start's failure counts
            return (yield from self._measure(configuration, replace(plan, fresh=True), runs))
        except BaseException:
            runs.end(kill=True)
            raise
        measurement.environment.update(conditions)
        if plan.perturbed:
            measurement.environment[PERTURBED] = True
            if fresh:
                runs.end()  # nothing else is measured with such weights
        measurement.rewrap_seconds = 0.0 if fresh else ready_s
        measurement.samples_per_step = self._samples(measurement.samples_per_step, knobs)
        lost = without_effect(knobs, start.facts)
        status, reason = window.judge_measurement(measurement, start.losses, lost)
        another = self._of_another_batch(start, knobs)
        if another and status is Status.OK:
            status, reason = Status.INVALID, another
        return Outcome(
            status,
            None if status is Status.INVALID else measurement,
            reason,
            str(group.log),
            fresh or (untouched and started_s > 0),
            started_s if untouched else 0.0,
        )

    @staticmethod
    def _paused(plan: Plan) -> frozenset[int]:
        """Processes of what it is measured in turns with, which are no strangers."""
        if math.isinf(plan.turn_seconds):
            return frozenset()
        return frozenset(p.pid for p in psutil.Process().children(recursive=True))

    def _compare_with_steps_made_again(
        self, first: Measurement, knobs: dict[str, Value], plan: Plan, deadline: float
    ) -> None:
        """Have nothing be changed in a running script whose steps are faster once they were made.

        Where kernels are planned for each new shape, say, a configuration would look the better for
        having come second.
        """
        runs = self._runs
        if not runs.go_back(knobs, plan, deadline):
            return
        try:
            again = alone(runs.score(replace(plan, look_steps=0), deadline, self._in_force(knobs)))
        except (GroupGone, EndedError):  # it has no more steps
            runs.end(kill=True)
            return
        if window.are_faster_again(first, again):
            runs.sound = False
            first.environment[MADE_AGAIN] = 1e3 * again.step_time_s

    def whole(self, configuration: Configuration) -> dict[str, Value]:
        """The accumulation follows from the micro-batch where both are mapped."""
        return self._known.with_accumulation(super().whole(configuration))

    def not_searched(self) -> dict[str, str]:
        """Knobs that this script has not, or that are not searched, and why."""
        return self._known.not_searched(self._where.wanted)

    def takes_between_steps(self, names: set[str]) -> bool:
        """Whether these knobs can be changed between two steps of a running script."""
        return self._known.scope(names) <= {Scope.STEP}

    @property
    def is_alive(self) -> bool:
        """Whether there is a start of it, measured or not."""
        return self._runs.start is not None

    def host_gib(self) -> float:
        """Memory of this host that the present start has for itself, as it is now."""
        found = 0
        for pid in self._runs.group.pids if self._runs.group is not None else ():
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(pid).memory_full_info().uss
        return found / 2**30

    def rest(self) -> None:
        """End the present start, so that something else may be measured; the next makes its own."""
        self._runs.end()

    def _is_cut_off(self, failed: Outcome, plan: Plan) -> bool:
        """Whether a failure says only that the search's time was over."""
        limit_s = self.environment.limits.trial_s
        return failed.status is Status.TIMEOUT and plan.time_limit_s < limit_s

    def _in_force(self, knobs: Mapping[str, Value]) -> dict[str, Value]:
        """What no library can be asked for: arguments of the script, variables of NCCL."""
        planned = transport.plan(knobs, self._where.maps)
        environ = {**os.environ, **planned.environment}
        of_nccl = {name: knobs[name] for name in knobs if name in nccl.VARIABLES}
        return {**planned.mapped, **nccl.read_back(environ, of_nccl)}

    def identity(self) -> dict[str, str]:
        """Command, ranks, devices and versions: what a result holds for."""
        return {
            "workload": "script " + " ".join(secrets.Redactor().words(self.options.words)),
            **self.hardware.identity(),
            **self._ways.way.to_identity(),
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """The order of expected effects; the memory of a device."""
        names = self.space.by_name
        order = [n for n in effect_order(Use.SCRIPT) if n in names]
        return Hints(
            baseline=dict(self.baseline),
            effect_order=(*order, *(n for n in names if n not in order)),
            memory_limit_gib=self.hardware.memory_gib,
        )

    def advice(self, trials: Sequence[Trial]) -> str:
        """What to try where the script does not run as it is."""
        words = self._ways.way.words(self.options.module) + self.options.words
        return f"See whether it runs alone: {shlex.join(words)}"

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the command, the environment and the few lines that make the script the same."""
        return export.export_files(
            self._changed(configuration),
            self._where.maps,
            self._ways.way,
            self._threads if THREADS_VARIABLE in os.environ else None,
            self.options.words,
            self.options.module,
            list(self._facts.wrappers) if self._facts is not None else [],
            directory,
        )

    def closing_lines(self, configuration: Configuration, trials: Sequence[Trial]) -> list[str]:
        """What the baseline's window had besides training; what the best asks of the script."""
        return [
            *validation_lines(trials),
            *made_again_lines(trials),
            *export.promises(self._changed(configuration)),
            *self._runs.lines_of_imports(),
            *self._line_of_lanes(),
        ]

    def _line_of_lanes(self) -> list[str]:
        if not self._met or self.lanes == 1:
            return []
        return [f"one trial ran at a time, once it was seen that {self.why_alone()}"]

    def not_as_before(self) -> str:
        """One line that names files of the user's that could not be put back."""
        self._close_runs()  # so that what starts did to files is undone, as far as it can be
        return self.files.not_as_before()

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """Only what is not as the script has it: the rest stays the script's own."""
        known = {*self._known.declared, ACCUMULATION.name}
        return {"knobs": {n: v for n, v in self._changed(configuration).items() if n in known}}

    def close(self) -> None:
        """End the script, and what an interrupt kept from becoming one."""
        self._close_runs()
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)

    def _close_runs(self) -> None:
        every = [self._runs, *self._others]
        for runs in every:  # before what any of them did to files is undone
            runs.end()
        for runs in every:
            runs.close()


# -----------------------------------------------------------------------------
# What a user asks of the timings of a script, and which of it a script does not support.

_WINDOW = "its phases are timed in the scored steps of every trial, and profiled nowhere else"


@dataclass(frozen=True)
class TimingOptions:
    """The keys that a script may not be able to honour.

    Attributes:
        searches: whether anything but the script as it is will be measured.
        staged: whether knobs are searched in the order of what they can give.
        min_gain: ``objective.min_gain``.
        metrics: the ``metrics.*`` keys.

    """

    searches: bool = True
    staged: bool = False
    min_gain: float = Objective.min_gain
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

    @classmethod
    def of(cls, settings: Settings) -> TimingOptions:
        """Read them from the settings."""
        return cls(
            searches=settings.mode == "search",
            staged=is_auto(settings.runner.options),
            min_gain=settings.objective.min_gain,
            metrics=settings.metrics,
        )

    def remarks(
        self, on_gpu: bool, facts: Facts | None, unsupported: Mapping[str, str] | None = None
    ) -> list[str]:
        """What has no effect, a line a key.

        Args:
            on_gpu: whether the script uses GPUs.
            facts: what it has built; ``None`` where it did not get so far.
            unsupported: what was asked of knobs and has no effect, and why.

        """
        lost = self._of_metrics()
        if self.searches and facts is not None:
            lost.update(unsupported or {})
        unbounded = _why_unbounded(on_gpu, facts)
        if unbounded and self.searches:
            if self.staged:
                lost["runner.knobs=auto"] = f"{unbounded}, so all knobs are searched together"
            if self.min_gain not in (0, Objective.min_gain):
                lost[f"objective.min_gain={self.min_gain:g}"] = unbounded
        return [f"warning: {key} has no effect on this script: {why}" for key, why in lost.items()]

    def _of_metrics(self) -> dict[str, str]:
        lost: dict[str, str] = {}
        if self.metrics.detail == "full":
            lost["metrics.detail=full"] = _WINDOW
        for name in ("begin_step", "end_step"):
            step = getattr(self.metrics, name)
            if step is not None:
                lost[f"metrics.{name}={step}"] = (
                    "the scored steps begin when step times have settled (3 to 8 steps)"
                )
        return lost


def _why_unbounded(on_gpu: bool, facts: Facts | None) -> str:
    """Why a script's phases do not bound what knobs can give; empty where they do."""
    why = "its host works ahead of the GPU" if on_gpu else facts.why_unbounded() if facts else ""
    return f"its phases do not bound what knobs can give, as {why}" if why else ""


# -----------------------------------------------------------------------------
# Which of a script's knobs are searched, and which are fixed.

_OF_FILES = frozenset({*effect_order(Use.DDP), *effect_order(Use.ZERO)})
"""Knobs that ``conf/runner`` names; what it does not name is searched without being named."""

_OF_ZERO_FILE = {
    record.name: record.default
    for record in (BUCKET_CAP, FORWARD_PREFETCH, BACKWARD_PREFETCH, CPU_OFFLOAD)
}
"""What ``conf/runner/zero.yaml`` pins for built-in workloads."""

_OF_OTHER_WORKLOADS = {
    record.name: record.default
    for record in (
        COMPILE,
        BLOCKS_PER_UNIT,
        SYNC_EACH,
        RESHARD_GROUP,
        MIXED_PRECISION,
        IMPLEMENTATION,
    )
}
"""What ``conf/runner`` pins for built-in workloads and no script can have otherwise."""


def without_file(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``runner.knobs`` of ``runner=zero`` without what its option file alone asks for."""
    return {n: v for n, v in knobs.items() if n not in _OF_ZERO_FILE or v != _OF_ZERO_FILE[n]}


def sort_script_knobs(job: ScriptJob, allowed: Numerics) -> ScriptSpace:
    """Sort the knobs that a script has by what the user wants of them.

    Raises:
        KnobError: there is no such knob, or it cannot take the value.

    """
    declared, absent = declare(job)
    mapped = frozenset(m.name for m in job.maps)
    settings, left_out = _applicable(job, mapped, declared, absent, allowed)
    searched, pinned = narrow(declared, settings, allowed)
    left_out = {**{name: absent[name] for name in mapped & absent.keys()}, **left_out}
    return ScriptSpace(
        space=Space(searched),
        baseline={knob.name: knob.default for knob in searched},
        pinned=pinned,
        declared={knob.name: knob for knob in declared},
        left_out=left_out,
        absent=absent,
        _arguments=job.arguments,
        _maps=job.maps,
    )


def _applicable(
    job: ScriptJob,
    mapped: frozenset[str],
    declared: Sequence[Knob],
    absent: Mapping[str, str],
    allowed: Numerics,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of ``runner.knobs`` there is in this script, and why the rest is left out.

    The option files name knobs of other workloads too; they are left out without a word.
    """
    by_name = {knob.name: knob for knob in declared}
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    wanted = job.wanted
    for name, setting in wanted.items():
        if name in by_name:
            too_much = by_name[name].numerics.rank > allowed.rank
            if too_much and setting == SEARCH:
                left_out[name] = _why_too_much(by_name[name], job, allowed)
            else:
                settings[name] = setting
        elif name in absent or name in _OF_FILES:
            left_out[name] = absent.get(name, _NOT_FROM_OUTSIDE)
        else:
            everything = {*by_name, *absent}
            raise KnobError(f"runner.knobs.{name}: no such knob. {nearest(name, everything)}")
    if SEARCH in [s for s in wanted.values() if isinstance(s, str)]:
        for name in by_name.keys() - wanted.keys() - (_OF_FILES - mapped):
            if by_name[name].numerics.rank <= allowed.rank and by_name[name].count != 1:
                settings[name] = SEARCH
    return settings, left_out


_NOT_FROM_OUTSIDE = "it cannot be given to a script from outside"


def _why_too_much(knob: Knob, job: ScriptJob, allowed: Numerics) -> str:
    """Why a knob changes more of the computation than is allowed, and what to do about it."""
    search = command.given().key(f"numerics={knob.numerics}")
    why, more = f"it is {knob.numerics} and numerics={allowed}", ""
    if knob.name == WORKERS.name and job.seen is not None:
        by = "share out a stream" if job.seen.shared_out else "draw random numbers"
        why = f"its processes {by}, so that another number of them trains something else ({why})"
        key = command.given().key("workload.draws_in_loader=false")
        more = f"; {key} says that it does not matter"
    return f"{why}. {search} searches it{more}"


@dataclass(frozen=True)
class ScriptSpace:
    """The knobs of a script, as far as they are known.

    Attributes:
        space: of the searched ones.
        baseline: the script's own values of the searched ones.
        pinned: knobs that the user has fixed, and their values.
        declared: every knob that exists, by name.
        left_out: knobs that are not searched, and why.
        absent: knobs that do not exist for it, and why.

    """

    space: Space
    baseline: dict[str, Value]
    pinned: dict[str, Value]
    declared: dict[str, Knob]
    left_out: dict[str, str]
    absent: Mapping[str, str]
    _arguments: Sequence[str]
    _maps: Sequence[Mapped]

    def changed(self, configuration: Configuration) -> dict[str, Value]:
        """The knobs that are not as the script has them, and what follows from them."""
        whole = {**self.pinned, **configuration}
        asked: dict[str, Value] = {
            name: value
            for name, value in whole.items()
            if value is not None and not same_value(value, self._today(name))
        }
        return self.with_accumulation(asked)

    def _today(self, name: str) -> Value:
        if name in self.baseline:
            return self.baseline[name]
        return self.declared[name].default if name in self.declared else None

    def with_accumulation(self, asked: dict[str, Value]) -> dict[str, Value]:
        """Add the accumulation that keeps the global batch, where it is mapped."""
        maps = {mapped.name: mapped for mapped in self._maps}
        micro = MICRO_BATCH.of(asked)
        if micro is None or ACCUMULATION.name not in maps:
            return asked
        both = [maps[record.name] for record in (MICRO_BATCH, ACCUMULATION)]
        today = [int(current(self._arguments, mapped) or 0) for mapped in both]
        share = today[0] * today[1]
        if share % int(micro):
            raise BadInputError(
                f"runner.knobs.micro_batch={micro}: it does not divide the {share} samples that a "
                "rank trains a step today"
            )
        return {**asked, ACCUMULATION.name: share // int(micro)}

    def not_searched(self, wanted: Mapping[str, Any]) -> dict[str, str]:
        """Each knob that is not searched, and why.

        Args:
            wanted: ``runner.knobs``; what is fixed there is not left out.

        """
        mapped = {one.name for one in self._maps}
        reasons = {**self.absent, **self.left_out}
        if MICRO_BATCH.name in self.baseline.keys() | self.pinned.keys():
            reasons.pop(ACCUMULATION.name, None)  # it follows
        for name in sorted((mapped & self.declared.keys()) - self.baseline.keys() - {*wanted}):
            key = command.given().key("runner.knobs.NAME=[A,B]")
            reasons.setdefault(name, f"only today's value is known. {key} names others")
        return reasons

    def left_out_lines(
        self, wanted: Mapping[str, Any], unsupported: Iterable[str] = ()
    ) -> list[str]:
        """The same for people: a line a reason, and one of all that cannot apply here.

        Args:
            wanted: ``runner.knobs``.
            unsupported: keys that are warned of, so that their knobs are not named once more.

        """
        mapped = {one.name: one for one in self._maps}
        apart: dict[str, list[str]] = {}
        lines: dict[str, list[str]] = {}
        for name, why in self.not_searched(wanted).items():
            if any(re.search(rf"[ .]{name}=", key) for key in unsupported):
                continue
            is_apart = why == _NOT_FROM_OUTSIDE or (name in self.absent and name not in mapped)
            (apart if is_apart else lines).setdefault(why, []).append(name)
        told = [f"not searched: {', '.join(names)}: {why}" for why, names in lines.items()]
        if apart:
            count = sum(map(len, apart.values()))
            each = "; ".join(f"{', '.join(names)} ({why})" for why, names in apart.items())
            told.append(f"cannot apply here, {count} parameter{'s' * (count > 1)}: {each}")
        as_today = [name for name in self.pinned if self._is_as_today(name)]
        if as_today:
            key = command.given().key(f"runner.knobs.{as_today[0]}=search")
            told.append(f"as today unless asked for ({key}): {', '.join(as_today)}")
        return told

    def _is_as_today(self, name: str) -> bool:
        """Whether a knob that could be searched is fixed to what the script has anyway."""
        knob = self.declared.get(name)
        return knob is not None and same_value(self.pinned[name], knob.default)

    def unsupported(self, wanted: Mapping[str, Any], mapped: Sequence[str]) -> dict[str, str]:
        """What the user named and what has no effect on this script, and why.

        Args:
            wanted: ``runner.knobs``; the option files' own values are nobody's request.
            mapped: names of the knobs that the user maps.

        """
        lost: dict[str, str] = {}
        maps = {
            m.name: f"--map{'-file' * bool(m.file)} {m.name}={m}"
            for m in self._maps
            if m.name in mapped
        }
        for name, why in self.left_out.items():
            asked = wanted.get(name)
            files = (SEARCH, None, _OF_ZERO_FILE.get(name), _OF_OTHER_WORKLOADS.get(name))
            if name in maps:
                lost[maps[name]] = why
            elif not any(asked is file or asked == file for file in files):
                lost[f"runner.knobs.{name}={asked}"] = why
        for name in maps.keys() & self.declared.keys() - self.baseline.keys() - wanted.keys():
            values = f"only {self.declared[name].default} is known of it. Name other values: "
            lost[maps[name]] = f"{values}{command.given().key(f'runner.knobs.{name}=[A,B]')}"
        if MICRO_BATCH.name in self.baseline.keys() | self.pinned.keys():
            lost.pop(maps.get(ACCUMULATION.name, ""), None)  # it follows
            asked = wanted.get(ACCUMULATION.name)
            follows = self.with_accumulation(dict(self.pinned)).get(ACCUMULATION.name)
            if isinstance(asked, int) and asked != follows:
                lost[f"runner.knobs.{ACCUMULATION.name}={asked}"] = "it follows from micro_batch"
        return lost

    def scope(self, names: set[str]) -> set[Scope]:
        """What must restart to change these knobs."""
        known = self.declared
        return {known[n].scope if n in known else Scope.PROCESS for n in names}
