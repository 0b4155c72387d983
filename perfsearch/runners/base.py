"""The contract of a runner: four things that every one has, and what only some can do beside."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from perfsearch.config.options import build_options
from perfsearch.config.schema import default_run_dir
from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Environment, Hardware
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Knob, Value
from perfsearch.core.rules import KEY, Rule, parse, refuse_unknown
from perfsearch.core.space import Constraint, Space
from perfsearch.core.trial import Outcome, Purpose, Trial
from perfsearch.workers import launchers
from perfsearch.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings


@dataclass(frozen=True)
class Plan:
    """How a configuration is to be measured.

    Attributes:
        number: the trial's number; logs and noise of a replay are drawn by it.
        purpose: why it is run.
        fresh: whether processes are started anew for it, whatever is still warm.
        attempt: 0, or which retry after an infrastructure failure this is.
        time_limit_s: seconds after which it is ended, start-up apart.
        scored_steps: smallest and largest number of scored steps.
        scored_seconds: wall time that the scored steps should cover.
        look_steps: as many steps are made at least where the job has them, in search of slow ones
            that recur seldom.
        look_seconds: unless they take longer than this.
        log_directory: where each rank's log goes.
        detail: ``light`` timings, or ``full``: a profile of further steps after the scored ones.
        begin_step: first step that the profile covers, counted from 1 at the trial's start;
            ``None``: the first after the scored ones, which is also the earliest.
        end_step: the last one.
        trace: whether the profile leaves a Chrome trace among the trial's logs.
        stop_above_cost_s: stop early once a step surely takes longer than this, in seconds.
        perturbed: whether weights are changed after the first step by as much as rounding does, to
            see what that makes of the losses. Only in a script, and of a runner that ``Perturbs``.
        lane: which share of the devices it runs on (see ``MeasuresBeside``).
        turn_seconds: about how long its scored steps go on before it gives way to others that are
            measured in turns with it (see ``MeasuresInTurns``); infinite: it never does.

    """

    number: int
    purpose: Purpose = Purpose.SEARCH
    fresh: bool = False
    attempt: int = 0
    time_limit_s: float = 300.0
    scored_steps: tuple[int, int] = (8, 60)
    scored_seconds: float = 1.0
    look_steps: int = 0
    look_seconds: float = math.inf
    log_directory: Path = Path("logs")
    detail: str = "light"
    begin_step: int | None = None
    end_step: int | None = None
    trace: bool = False
    stop_above_cost_s: float | None = None
    perturbed: bool = False
    lane: int = 0
    turn_seconds: float = math.inf


Measured = TypeVar("Measured")

Turns = Generator[bool, bool, Measured]
"""A measurement that gives way to others. It says, first when its steps have settled and then
after each of its windows, whether it has measured enough, and is told whether to go on."""


def alone(turns: Turns[Measured]) -> Measured:
    """Have it measured to its end without giving way to anything."""
    try:
        enough = next(turns)
        while True:
            enough = turns.send(not enough)
    except StopIteration as end:
        measured: Measured = end.value
        return measured


class Runner(ABC):
    """Knows what can be tuned and measures it. It never sees the strategy.

    The constructor sets ``space`` (the searched knobs), ``baseline`` (their values today) and
    ``pinned`` (values of the other knobs, if any); configurations have the searched ones only. It
    refuses wrong input by a ``ValueError`` and starts nothing. ``open`` may, its devices being
    held; ``close`` ends every process, however the search ends.

    A subclass lives in its own module ``perfsearch.runners.NAME``, with its keys in
    ``conf/runner/NAME.yaml`` and a frozen dataclass ``Options`` that documents them. What only some
    can do, such as ``Screens``, is a class below, inherited beside this one.
    """

    requires: ClassVar[Mapping[str, str]] = {}  # packages, and the extra that brings each
    trains: ClassVar[bool] = True  # ``measure`` runs the job, so that ``mode=profile`` is possible
    several_nodes: ClassVar[bool] = False  # its ranks may be on more nodes than this one
    on_one_node: ClassVar[str] = ""  # what to do where they may not, and are wanted there
    space: Space
    baseline: dict[str, Value]
    pinned: dict[str, Value] = {}
    devices: int = 1  # ranks
    remarks: Sequence[str] = ()  # lines for the user to see before trial 0
    cautions: Sequence[str] = ()  # what the user should know before anything is started
    declared: Mapping[str, Knob] = {}  # every knob that this job has, searched or not
    left_out: Mapping[str, str] = {}  # knobs that are not searched although asked for, and why
    unseen: ClassVar[str] = ""  # what of its knobs is only known once it is open

    rules: Sequence[Rule] = ()  # the user's own, between knobs

    @dataclass(frozen=True)
    class Options:
        """Options of the runner, as keys ``runner.*``; those of a subclass extend these.

        Attributes:
            constraints: rules between knobs that every configuration keeps which is tried, such as
                ``micro_batch * gradient_accumulation <= 64``.

        """

        constraints: tuple[str, ...] = field(default=(), kw_only=True)

    def __init__(self, options: Any, environment: Environment) -> None:
        self.options: Any = options
        self.environment = environment

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build it from the checked settings; what is wrong with them is a ``BadInputError``."""
        try:
            made = cls.build(settings)
        except BadInputError:
            raise
        except ValueError as error:
            raise BadInputError(str(error)) from error
        made.keep(settings)
        return made

    @classmethod
    def build(cls, settings: Settings) -> Self:
        """Call the constructor; overridden where that needs more of the settings."""
        options = build_options(cls.Options, settings.runner.options, "runner")
        return cls(options, environment_of(settings))

    @abstractmethod
    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Run the configuration; every failure of it is an outcome, never an exception."""

    @abstractmethod
    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the configuration in forms that work without perfsearch; return the files."""

    def open(self, run_dir: Path) -> None:
        """Get ready in the search's directory, maybe a numbered neighbour of the one asked for."""
        self.environment = replace(self.environment, run_dir=run_dir)

    def close(self) -> None:  # noqa: B027 - a runner may have nothing to end
        """End every process that it started."""

    # -------------------------------------------------------------------------
    # Rules of the user's own between knobs.

    def keep(self, settings: Settings) -> None:
        """Keep the rules of ``runner.constraints``.

        Raises:
            BadInputError: one cannot be read, names no knob of this job, or nothing keeps them.

        """
        given = {k: v for k, v in settings.runner.options.items() if k == "constraints"}
        options = build_options(Runner.Options, given, "runner")
        self.rules = [parse(text) for text in options.constraints]
        if self.space.knobs or self.pinned:  # else it is settled once it is open
            self.space = self.ruled(self.space)

    def ruled(self, space: Space) -> Space:
        """The part of ``space`` that keeps the user's rules; ``pinned`` and the like are settled.

        Raises:
            BadInputError: a rule names something that is no knob, or nothing keeps them.

        """
        if not self.rules:
            return space
        known = [*space.by_name, *self.pinned, *self.whole(self.baseline), *self.not_searched()]
        for rule in self.rules:
            refuse_unknown(rule, known)
        made = space.within([self._constraint(rule) for rule in self._rules_here()])
        if made.knobs and made.is_empty():
            lines = self._broken_by(self.baseline) or ["no configuration keeps them all"]
            raise BadInputError(
                f"{KEY}: nothing is left to search. {'; '.join(lines)}. Loosen a rule, or "
                "give knobs more values."
            )
        return made

    def whole(self, configuration: Configuration) -> dict[str, Value]:
        """A configuration with the knobs that are pinned, and with those that follow from it."""
        return {**self.pinned, **configuration}

    def rule_lines(self) -> list[str]:
        """What to say of the rules before trial 0."""
        values, absent = self.whole(self.baseline), self.not_searched()
        lines = []
        for rule in self.rules:
            name = next((name for name in rule.names if name not in values), None)
            if name is not None:
                why = absent.get(name, "it is not known of this job")
                lines.append(f"warning: {rule.key} has no effect: {name}: {why}")
        for line in self._broken_by(self.baseline):
            lines.append(f"today's configuration breaks {line}; it is measured all the same")
        return lines

    def _rules_here(self) -> list[Rule]:
        """Those whose knobs this job has."""
        values = self.whole(self.baseline)
        return [rule for rule in self.rules if all(name in values for name in rule.names)]

    def _constraint(self, rule: Rule) -> Constraint:
        def holds(configuration: Configuration) -> bool:
            return rule.holds(self.whole(configuration))

        return Constraint(rule.text, holds, f"{rule.key} is broken")

    def _broken_by(self, configuration: Configuration) -> list[str]:
        values = self.whole(configuration)
        return [
            f"{rule.key} ({rule.why_not(values)})"
            for rule in self._rules_here()
            if not rule.holds(values)
        ]

    def identity(self) -> dict[str, str]:
        """What a result depends on apart from knobs: model, world size, device names, versions."""
        return {}

    def not_searched(self) -> dict[str, str]:
        """Knobs that this job has not, or that are not searched, and why."""
        return dict(self.left_out)

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """What is known of the space; predictions may use ``trials``, which grows."""
        return Hints(baseline=dict(self.baseline))

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """The ``runner.*`` keys under which exactly ``configuration`` runs, and nothing else."""
        return {"knobs": {**self.pinned, **configuration}}


# -----------------------------------------------------------------------------
# What only some runners can do. The pipeline asks by ``isinstance``.


class HoldsDevices:
    """Runs on devices that no other search may use at the same time."""

    hardware: Hardware

    def device_set(self) -> str:
        """``cpu``, or the UUIDs of the GPUs used."""
        return self.hardware.device_set


class MeasuresBeside(ABC):
    """Can measure several configurations at a time: its devices are dealt out to *lanes*, and the
    plan says which of them a trial has. ``measure`` is then called from several threads, never
    twice at a time for one lane; whatever is measured alone has lane 0.
    """

    lanes: int = 1
    """How many it can measure at a time, as ``parallel_trials`` asks for."""

    shares_host: bool = True
    """Whether lanes may disturb each other, as they share memory, caches and links."""

    def why_alone(self) -> str:
        """Why only one is to be measured at a time after all, as the baseline has shown, or what
        came later; empty where nothing speaks against several.
        """
        return ""

    @abstractmethod
    def break_off(self) -> None:
        """Make every ``measure`` that is under way return soon; nothing is measured any more."""


class MeasuresInTurns(ABC):
    """Can have several configurations alive, of which one is measured at a time and the others are
    paused, so that all of them meet the same load.
    """

    @abstractmethod
    def measure_in_turns(self, configuration: Configuration, plan: Plan) -> Turns[Outcome]:
        """As ``measure``, giving way to others; closing it leaves nothing of it running."""

    @abstractmethod
    def why_not_in_turns(self) -> str:
        """Why configurations must be measured one after the other; empty where they need not."""


class StartsScripts:
    """Measures in starts of the user's own script, two of which may differ though nothing was
    changed.
    """

    start_failure: str = ""
    """Why the start that ``open`` made was none, so that nothing is known of the script's knobs."""

    start_failed_from_outside: bool = False
    """Whether the script had no part in that, so that another start may well succeed."""


class Perturbs(ABC):
    """Can measure with weights that are changed by as much as rounding does (``Plan.perturbed``).

    What that makes of the baseline's losses is then allowed to configurations that round otherwise.
    """

    @abstractmethod
    def rounds_otherwise(self, reference: Configuration, configuration: Configuration) -> bool:
        """Whether the second computes the same in another order, or by other kernels."""


class Screens(ABC):
    """Refuses by arithmetic alone, at no cost, what cannot run."""

    @abstractmethod
    def screen(self, configuration: Configuration) -> str | None:
        """Why it is refused; ``None`` when it may run."""


class Advises(ABC):
    """Knows what the user could do where nothing ran."""

    @abstractmethod
    def advice(self, trials: Sequence[Trial]) -> str:
        """What to do where no trial succeeded; empty where nothing is known."""


class ClosingLines(ABC):
    """Has more to say of the configuration that is handed over than its knobs."""

    @abstractmethod
    def closing_lines(self, configuration: Configuration, trials: Sequence[Trial]) -> list[str]:
        """What to print of it at the end."""


class KeepsFiles(ABC):
    """Puts files of the user's back that starts of a script changed."""

    @abstractmethod
    def not_as_before(self) -> str:
        """One line that names those that could not be; empty where there is none."""


class FollowsUp(ABC):
    """Does what the user wants done with the result."""

    @abstractmethod
    def follow_up(self, configuration: Configuration) -> int:
        """Do it, once the result is on record; an exit code."""


class SettlesSettings(ABC):
    """Takes top-level keys from files of its own."""

    @classmethod
    @abstractmethod
    def settle(cls, settings: Settings) -> Settings:
        """Fill them in, before anything is built.

        Raises:
            BadInputError: as ``Runner.from_settings``.

        """


class TakesScripts(ABC):
    """Its knobs also exist in the user's own script, which the runner of scripts then starts."""

    @classmethod
    @abstractmethod
    def for_script(cls, settings: Settings) -> tuple[str, Mapping[str, Any]]:
        """``runner.device`` and ``runner.knobs`` for the runner of ``workload=script``.

        Raises:
            BadInputError: as ``Runner.from_settings``.

        """


class NoKnobs:
    """Has no keys ``runner.knobs``."""

    no_knobs: ClassVar[str]
    """Why, and what to do instead."""


Mode = Callable[["Settings", Callable[[str], None]], int]
"""Takes the settings and what shows a line; returns an exit code."""


class OwnModes:
    """Does by itself what some values of ``mode`` ask for, without a search."""

    own_modes: ClassVar[Sequence[str]]
    """The values, each with a method of that name, or what ``own_mode`` gives for it."""

    def own_mode(self, mode: str) -> Mode:
        """The method of one of them."""
        method: Mode = getattr(self, mode)
        return method


# -----------------------------------------------------------------------------
# What the settings say of where to run, and of what is trained.


def environment_of(settings: Settings) -> Environment:
    """Where and within which limits the settings let processes run."""
    return Environment(
        run_dir=(settings.run_dir or default_run_dir(settings)).absolute(),
        nproc=None if settings.nproc == "auto" else settings.nproc,
        nnodes=settings.nnodes,
        launcher=launchers.of_settings(settings),
        seed=settings.seed,
        numerics=settings.numerics,
        limits=settings.limits,
        parallel_trials=settings.parallel_trials,
    )


def workload_of(settings: Settings) -> WorkloadSpec:
    """What the settings say is trained; nothing of it is settled yet."""
    return WorkloadSpec.from_mapping({"name": settings.workload.name, **settings.workload.options})
