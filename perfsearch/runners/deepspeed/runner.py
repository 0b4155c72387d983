"""A DeepSpeed job as its user starts it: the configuration tuned, command and script unchanged."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from perfsearch.config.options import build_options
from perfsearch.core import hardware, secrets
from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Numerics, Value
from perfsearch.core.narrow import SEARCH, narrow
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Outcome, Purpose, Status, Trial
from perfsearch.instrument.outside import cautions
from perfsearch.instrument.seeds import hash_seed
from perfsearch.instrument.user_files import UserFiles
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch, settle
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.zero import applicable
from perfsearch.runners.base import (
    FollowsUp,
    HoldsDevices,
    KeepsFiles,
    Plan,
    Runner,
    Screens,
    SettlesSettings,
    StartsScripts,
    environment_of,
)
from perfsearch.runners.deepspeed import config, job, trial
from perfsearch.runners.deepspeed.autotuning import SECTION, Autotuning, filled_in
from perfsearch.runners.deepspeed.command import ON_ONE_NODE, Command
from perfsearch.runners.deepspeed.memory import Memory
from perfsearch.runners.deepspeed.request import Request
from perfsearch.runners.zero import export
from perfsearch.tracking import store_files
from perfsearch.training.clock import USABLE
from perfsearch.workers import processes
from perfsearch.workers.pool import not_in_force

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_SEARCHED = (STAGE.name, MICRO_BATCH.name, ACCUMULATION.name)


class DeepSpeed(
    Runner, HoldsDevices, StartsScripts, Screens, KeepsFiles, FollowsUp, SettlesSettings
):
    """Searches ZeRO stage, batch and ZeRO settings of a DeepSpeed job in its own processes.

    The command is started anew for every trial with another ``ds_config.json``, in which only the
    searched keys differ. ``"auto"``, ``autotuning.arg_mappings`` and lists of choices mean what
    they mean to DeepSpeed's own tuner. Steps are timed whole and from outside, the loading of data
    included; the job is ended after the last scored one. The tuned file, the command and a summary
    are left in ``autotuning.results_dir``.

    Args:
        options: the ``runner.*`` keys.
        command: the launch command.
        file: path of the configuration.
        environment: where and within which limits to run.
        batch: ``fixed`` or ``free``.
        mappings: like ``autotuning.arg_mappings``, and added to them.

    Attributes:
        counted: samples that throughput counts for a step of today; ``None``: the global batch.
        silence: further arguments of the script in trials.
        left_out: knobs that are not searched although they were asked for by default, and why.

    Raises:
        BadInputError: something cannot work here; nothing was started.

    """

    on_one_node = ON_ONE_NODE

    @dataclass(frozen=True)
    class Options(Runner.Options):
        """The ``runner.*`` keys of this runner.

        Attributes:
            ds_config: path of the configuration; ``null`` where the command names it. One that the
                script itself names is replaced as the script gives it to ``deepspeed.initialize``.
            autotuning: ``tune`` ends with the tuned file, ``run`` starts the training with it;
                ``null``: as the command's ``--autotuning`` says, else ``tune``.
            memory_headroom: share of a GPU's memory that a configuration must leave unused.
            knobs: ``runner.knobs``, as ``perfsearch.core.narrow`` reads it; ``configured`` leaves
                one as the file has it.

        """

        ds_config: str | None = None
        autotuning: Literal["tune", "run"] | None = None
        memory_headroom: float = option(0.05, low=0, high=0.9)
        knobs: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(_SEARCHED, SEARCH))

    @classmethod
    def settle(cls, settings: Settings) -> Settings:
        """Let the file's ``autotuning`` section fill in what the user's own keys leave open."""
        file = job.command_and_file(settings)[1]
        return filled_in(settings, Autotuning.parse(config.read_json(file)))

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Build it from ``runner.*``, ``workload.command``, ``limits.*`` and top-level keys."""
        options = build_options(cls.Options, settings.runner.options, "runner")
        command, file = job.command_and_file(settings)
        given = settings.workload.options
        knobs = job.with_mapped_keys(options.knobs, given, file)
        options = replace(options, knobs=knobs)
        mappings = job.mappings(given)
        environment = environment_of(settings)
        made = cls(options, command, file, environment, settings.batch, mappings)
        made.counted = job.samples_per_step(settings)
        made.silence = job.silence(given)
        made.files.own = [
            *store_files(settings),
            *(p.absolute() for p in (made.autotuning.exps_dir, made.autotuning.results_dir)),
        ]
        return made

    def __init__(
        self,
        options: Options,
        command: Command,
        file: Path,
        environment: Environment,
        batch: Literal["fixed", "free"] = "fixed",
        mappings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(options, environment)
        self.command = command
        self.file = config.read_json(file)
        section = Autotuning.parse(self.file)
        arguments = {**section.arg_mappings, **(mappings or {})}
        self.autotuning = replace(section, arg_mappings=arguments)
        self.action = options.autotuning or command.autotuning or "tune"
        if self.action == "run" and command.config_path is None:
            raise BadInputError(
                f"runner.autotuning=run: the command does not name {file}, so it cannot be started "
                "with another. Add its path to the command, or use runner.autotuning=tune"
            )
        self.hardware = job.hardware(command, environment)
        self.devices = self.hardware.world_size
        ranks = job.data_parallel(self.devices, self.autotuning)
        now = config.batch_today(self.file, command, ranks, self.autotuning.arg_mappings)
        self.mappings = now.mappings
        self.batch = job.batch_within(now, ranks, batch, self.autotuning)
        declared, absent = config.declare(self.file, self.batch, self.autotuning)
        wanted = config.settings_of(options.knobs, self.file, self.autotuning)
        settings, self.left_out = applicable(
            settle(self.batch, wanted), declared, absent, environment.numerics, batch == "free"
        )
        searched, self.pinned = narrow(declared, settings, Numerics.ALTERING)
        self.space = Space(searched, [self.batch.constraint(self.pinned)])
        self.baseline = {knob.name: knob.default for knob in searched}
        self.declared = {knob.name: knob for knob in declared}
        self.remarks = job.remarks(self.autotuning, self.batch)
        self.memory = Memory(
            self.file,
            ranks,
            self.pinned,
            self.hardware.memory_gib,
            options.memory_headroom,
            self.autotuning.num_params,
        )
        self.counted: int | None = None
        self.silence: tuple[str, ...] = ()
        self.files = UserFiles()
        script = command.words[command.script_at]
        self.cautions = cautions(script, not script.endswith(".py"), command.arguments)
        self._trials: Sequence[Trial] = ()
        self._survived: set[str] = set()

    def open(self, run_dir: Path) -> None:
        """End what a killed controller left behind."""
        super().open(run_dir)
        processes.reap_groups(run_dir)
        self.files.own = [run_dir, *self.files.own]
        self.remarks = [*self.remarks, *self.files.open()]

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Start the command with this configuration, and end it after its scored steps."""
        whole = {**self.pinned, **configuration}
        key, is_baseline = key_of(configuration), key_of(configuration) == key_of(self.baseline)
        survive = plan.purpose is Purpose.CONFIRM and not is_baseline and key not in self._survived
        outcome = trial.run(self._start(whole, plan, survive), plan.time_limit_s)
        outcome = replace(outcome, fresh_process=True)
        if outcome.status is not Status.OK or outcome.measurement is None:
            return outcome
        applied = {n: v for n, v in whole.items() if config.applies(n, whole)}
        ignored = not_in_force(applied, outcome.measurement.in_force)
        ignored += self._not_fed(whole, outcome)
        if ignored:
            return replace(outcome, status=Status.NOT_APPLIED, reason="; ".join(ignored))
        if self.counted is not None:
            samples = outcome.measurement.samples_per_step or 0
            outcome.measurement.samples_per_step = self.counted * samples // self.batch.global_batch
        if is_baseline:
            return outcome
        lack = self.memory.lacks_headroom(outcome.measurement)
        if lack:
            return replace(outcome, status=Status.OOM, reason=lack)
        if survive:
            self._survived.add(key)
        return outcome

    def whole(self, configuration: Configuration) -> dict[str, Value]:
        """The accumulation follows from the micro-batch where the batch is fixed."""
        whole = super().whole(configuration)
        return {**whole, ACCUMULATION.name: self.batch.accumulation_of(whole)}

    def _start(self, whole: Mapping[str, Value], plan: Plan, survive: bool) -> trial.Start:
        logs = plan.log_directory.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        made, options = config.write(self.file, whole, self.batch, self.mappings)
        file = logs / "ds_config.json"
        config.write_json(file, made)
        if plan.purpose in (Purpose.BASELINE, Purpose.SEARCH):
            name = config.experiment(whole, self.batch, plan.number)
            config.write_json(self.autotuning.exps_dir.absolute() / f"{name}.json", made)
        pid = os.getpid()
        request = Request(
            log_directory=str(logs),
            controller=(pid, processes.started_at(pid)),
            config="" if self.command.config_path else str(file),
            scored_steps=plan.scored_steps,
            scored_seconds=plan.scored_seconds,
            look_steps=plan.look_steps,
            look_seconds=plan.look_seconds,
            limit_s=USABLE * plan.time_limit_s,
            profile_steps=self.autotuning.profile_steps(),
            stop_above_s=plan.stop_above_cost_s,
            survive=survive,
            seed=self.environment.seed,
        )
        return trial.Start(
            words=[*self.command.for_trial(file, options, trial.free_port()), *self.silence],
            request=request,
            ranks=self.devices,
            run_dir=self.environment.run_dir,
            limits=self.environment.limits,
            gpus=self.hardware.gpus,
            variables={
                **hash_seed(self.environment.seed, os.environ),
                **self.environment.variables,
            },
            files=self.files,
        )

    def _not_fed(self, whole: Mapping[str, Value], outcome: Outcome) -> list[str]:
        """Whether the script goes on loading the batches that it loads today."""
        first = next((t.measurement for t in self._trials if t.purpose is Purpose.BASELINE), None)
        assert outcome.measurement is not None
        micro, today = int(whole[MICRO_BATCH.name] or 1), self.batch.micro_batch
        why = config.why_not_fed(first, outcome.measurement, micro, today)
        return [why] if why else []

    def identity(self) -> dict[str, str]:
        """Command, configuration, ranks, devices and versions: what a result holds for."""
        text = config.dump_json({k: v for k, v in self.file.items() if k != SECTION})
        return {
            "command": shlex.join(secrets.Redactor().words(self.command.words)),
            "ds_config": hashlib.sha256(text.encode()).hexdigest()[:16],
            "global_batch": f"{self.batch.global_batch} {self.batch.rule}",
            "world_size": str(self.devices),
            "gpu": self.hardware.device_name,
            "torch": hardware.torch_version(),
            "deepspeed": job.version(),
            "driver": hardware.driver_version() if self.hardware.gpus else "",
        }

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """Larger micro-batches are faster until memory ends; stages in order; predicted peaks."""
        self._trials = trials
        names = self.space.by_name
        return Hints(
            baseline=dict(self.baseline),
            effect_order=tuple(n for n in config.EFFECT_ORDER if n in names),
            monotonic={MICRO_BATCH.name: 1} if MICRO_BATCH.name in names else {},
            stage_knob=STAGE.name if STAGE.name in names else None,
            memory_limit_gib=self.memory.limit_gib,
            predict=lambda configuration: self.memory.predict(configuration, trials),
        )

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """The peak of a GPU's memory, from DeepSpeed's formulas and the trials so far."""
        return self.memory.predict(configuration, trials)

    def screen(self, configuration: Configuration) -> str | None:
        """Refuse what surely does not fit."""
        return self.memory.refusal(configuration, self._trials)

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the tuned file where DeepSpeed's tuner leaves its own, and beside the result."""
        made, options = config.write(
            self.file, {**self.pinned, **configuration}, self.batch, self.mappings
        )
        return export_files(
            self.command,
            made,
            options,
            self.autotuning,
            self.batch,
            self._trials,
            self.pinned,
            directory,
        )

    def not_as_before(self) -> str:
        """One line that names files of the user's that could not be put back."""
        self.files.close()
        return self.files.not_as_before()

    def follow_up(self, configuration: Configuration) -> int:
        """Start the training with the tuned file, where ``--autotuning run`` was asked for."""
        if self.action != "run":
            return 0
        _, options = config.write(
            self.file, {**self.pinned, **configuration}, self.batch, self.mappings
        )
        tuned = self.autotuning.results_dir.absolute() / TUNED
        return trial.train(tuned_command(self.command, tuned, options))

    def close(self) -> None:
        """End what an interrupt may have left, and put the user's files back."""
        processes.reap_groups(self.environment.run_dir, grace_s=0.0)
        self.files.close()


# -----------------------------------------------------------------------------
# What is handed over: the tuned configuration where DeepSpeed's own tuner leaves its.

TUNED, COMMAND, SUMMARY = "ds_config_optimal.json", "cmd_optimal.txt", "summary.txt"

_NOTES = (
    "The script was run unchanged, so its longest batch is whatever its own loader gave in the "
    "measured steps; a finalist has also saved a checkpoint.\n"
)


def export_files(
    command: Command,
    configuration: Mapping[str, Any],
    options: Mapping[str, str],
    autotuning: Autotuning,
    batch: Batch,
    trials: Sequence[Trial],
    pinned: Mapping[str, Any],
    directory: Path,
) -> list[Path]:
    """Write tuned file, command and summary, both here and in ``autotuning.results_dir``.

    Args:
        command: of the user.
        configuration: the tuned one.
        options: of the script, that get another value.
        autotuning: where results go.
        batch: the arithmetic of batches.
        trials: of the search, for the summary.
        pinned: knobs that every configuration shares.
        directory: of the search's own result.

    """
    results = autotuning.results_dir.absolute()
    tuned = results / TUNED
    quoted, _, _ = secrets.in_shell(tuned_command(command, tuned, options), os.environ)
    words = " ".join(quoted) + "\n"
    summary = export.tuning_summary(trials, batch, pinned)
    written: list[Path] = []
    for place in (results, directory):
        place.mkdir(parents=True, exist_ok=True)
        keeps = place == results and not autotuning.overwrite
        name = TUNED if place == results else "ds_config.json"
        if keeps:
            _set_aside(place / name)
        config.write_json(place / name, configuration)
        (place / COMMAND).write_text(words)
        (place / SUMMARY).write_text(summary)
        written += [place / name, place / COMMAND, place / SUMMARY]
    (directory / "notes.txt").write_text(_NOTES)
    return [*written, directory / "notes.txt"]


def tuned_command(command: Command, tuned: Path, options: Mapping[str, str]) -> list[str]:
    """The user's command with the tuned file in the place of the user's, and no tuning."""
    return command.for_trial(tuned, options, port=None)


def _set_aside(file: Path) -> None:
    """Keep an older result under the next free number."""
    if not file.exists():
        return
    number = 1
    while (aside := file.with_name(f"{file.name}.{number}")).exists():
        number += 1
    file.rename(aside)
