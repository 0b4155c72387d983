"""A search from checked settings to its record.

``run`` builds the parts and refuses what cannot work; ``search`` opens them and closes them again;
``_stages`` are what happens between: resume, baseline, explore, confirm. ``record`` is the fifth.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import runners, strategies
from perfsearch.config.options import ConfigError, build_options
from perfsearch.config.schema import Settings, default_run_dir
from perfsearch.core import command, shortage
from perfsearch.core.errors import BadInputError
from perfsearch.core.extras import how_to_install
from perfsearch.core.figures import show_path
from perfsearch.core.files import make_private, temporary_directory, why_not_writable
from perfsearch.core.hardware import occupants
from perfsearch.core.hints import Hints
from perfsearch.core.journal import JOURNAL
from perfsearch.core.narrow import is_auto
from perfsearch.core.objective import REWARDS_LESS, Metric
from perfsearch.core.signals import ExitCode, deferred
from perfsearch.core.space import Space
from perfsearch.core.trial import Status, Trial
from perfsearch.knobs.model import COMPILE, is_compiled
from perfsearch.metrics.slow_steps import SLOW_STEPS, told_shortly
from perfsearch.pipeline import (
    baseline,
    cards,
    confirm,
    explore,
    neighbours,
    record,
    resume,
    transfer,
)
from perfsearch.pipeline.resume import device_lock, run_directory_lock
from perfsearch.pipeline.session import BreakerError, Result, Session, Verdict, View
from perfsearch.runners.base import (
    Advises,
    FollowsUp,
    HoldsDevices,
    MeasuresBeside,
    OwnModes,
    Runner,
    SettlesSettings,
    TakesScripts,
)
from perfsearch.strategies.base import Strategy, Surroundings
from perfsearch.tracking import open_tracker
from perfsearch.workers import launchers
from perfsearch.workers.processes import OtherPrograms, reap_groups
from perfsearch.workloads.spec import SCRIPT

if TYPE_CHECKING:
    from perfsearch.metrics.system import SystemSampler
    from perfsearch.tracking import Tracker

PROFILED = "mode=profile: the baseline was measured, and nothing searched"

_PIPELINE_MODES = ("search", "profile")

ViewFactory = Callable[[Settings], "AbstractContextManager[View]"]
"""Opens what shows a search while it runs."""

StrategyFactory = Callable[[Space, Hints], Strategy]
"""Makes the strategy once the runner's space and hints are known."""

TrackerFactory = Callable[[Settings, Path, str], "Tracker"]
"""Makes the MLflow view of the settings, the run directory and the search's identifier."""


def run(settings: Settings, open_view: ViewFactory) -> int:
    """Do what ``settings.mode`` asks for; return the exit code.

    Args:
        settings: the checked configuration.
        open_view: opens what shows it, once nothing is left that could be refused.

    Raises:
        BadInputError: something asked for cannot be done; nothing was started.

    """
    return carry_out(settings, open_view)[1]


def run_search(
    settings: Settings, open_view: ViewFactory, function: Callable[..., Any] | None = None
) -> Result:
    """The same, returning what the search came to.

    Args:
        settings: the checked configuration.
        open_view: as ``run`` takes it.
        function: that proposes, where ``settings.strategy`` names it.

    Raises:
        BadInputError: something asked for cannot be done, or ``settings.mode`` is none of the
            pipeline's.
        Interrupted: a signal came; finished trials are recorded first.

    """
    if settings.mode not in _PIPELINE_MODES:
        allowed = " and mode=".join(_PIPELINE_MODES)
        raise ConfigError(
            "mode", f"mode={settings.mode}: it has no result. From Python there is mode={allowed}."
        )
    result, _ = carry_out(settings, open_view, function)
    assert result is not None
    return result


def carry_out(
    settings: Settings, open_view: ViewFactory, function: Callable[..., Any] | None = None
) -> tuple[Result | None, int]:
    """The same, returning what the search came to, where there was one, and the exit code."""
    settings = settled(settings)
    strategy = strategy_factory(settings, function)
    directory = settings.run_dir or default_run_dir(settings)
    foreign = check_directory(settings)
    runner = build_runner(settings)
    with open_view(settings) as view:
        if not isinstance(runner, OwnModes) or settings.mode not in runner.own_modes:
            result = search(settings, runner, strategy, view)
            if result.exit_code or not isinstance(runner, FollowsUp):
                return result, int(result.exit_code)
            return result, runner.follow_up(result.handed_over)
        try:
            return None, runner.own_mode(settings.mode)(settings, view.note)
        finally:
            runner.close()
            if not foreign and directory.is_dir():
                (directory / _OWN_MODE).touch()


# -----------------------------------------------------------------------------
# Before anything is started: the strategy and the runner are built, the directory is checked.


def settled(settings: Settings) -> Settings:
    """The settings with what the runner takes from files of its own.

    Raises:
        BadInputError: no such runner, or a file says what cannot be.

    """
    runner = _runner(settings)
    return runner.settle(settings) if issubclass(runner, SettlesSettings) else settings


def strategy_factory(
    settings: Settings, function: Callable[..., Any] | None = None
) -> StrategyFactory:
    """The strategy that ``settings`` names, its options checked.

    Args:
        settings: the checked configuration.
        function: given from Python to a strategy that calls one.

    Raises:
        BadInputError: no such strategy, a wrong option, or an optional package is missing.

    """
    name = settings.strategy.name
    strategy: type[Strategy] = _load(strategies.load, "strategy", name)
    options = build_options(strategy.Options, settings.strategy.options, "strategy")
    staged = is_auto(settings.runner.options) and not strategy.sees_all_knobs
    make: Callable[..., Strategy] = strategy
    if function is not None:
        make = partial(make, function=function)
    return _Factory(make, settings.seed, options, staged)


@dataclass(frozen=True)
class _Factory:
    """A strategy's class with everything but the space; can be sent to another process."""

    strategy: Callable[..., Strategy]
    seed: int
    options: Any
    staged: bool = False

    def __call__(self, space: Space, hints: Hints) -> Strategy:
        if self.staged:
            from perfsearch.strategies._staged import Staged

            return Staged(space, hints, self.seed, replace(self, staged=False))
        return self.strategy(space, hints, self.seed, self.options)


def build_runner(settings: Settings) -> Runner:
    """The runner that ``settings`` names; it has started nothing yet.

    Raises:
        BadInputError: no such runner, it lacks ``settings.mode``, or anything that the runner
            itself finds wrong (a missing GPU, an impossible batch, a factory that fails).

    """
    name = settings.runner.name
    runner = _runner(settings)
    modes = ["search", *(["profile"] if runner.trains else [])]
    own = runner.own_modes if issubclass(runner, OwnModes) else ()
    if settings.mode not in (*modes, *own):
        has = " and mode=".join([*modes, *own])
        raise ConfigError("mode", f"mode={settings.mode}: runner={name} has only mode={has}.")
    if settings.nnodes > 1 and not runner.several_nodes:
        instead = f" {runner.on_one_node}" if runner.on_one_node else ""
        raise ConfigError(
            "nnodes",
            f"nnodes={settings.nnodes}: runner={name} runs on one node. Allowed: 1.{instead}",
        )
    if settings.batch == "free" and settings.objective.metric is Metric.LATENCY:
        raise ConfigError("objective.metric", REWARDS_LESS)
    if settings.workload.name == SCRIPT and issubclass(runner, TakesScripts):
        from perfsearch.runners._script.runner import Script

        _require_lanes(settings, Script, "workload=script")
        return Script.from_options(settings, *runner.for_script(settings))
    _require_lanes(settings, runner, f"runner={name}")
    return runner.from_settings(settings)


def _require_lanes(settings: Settings, runner: type[Runner], named: str) -> None:
    several = settings.parallel_trials
    if several > 1 and not issubclass(runner, MeasuresBeside):
        raise ConfigError(
            "parallel_trials",
            f"parallel_trials={several}: {named} measures one trial at a time. Allowed: 1.",
        )


def _runner(settings: Settings) -> type[Runner]:
    runner: type[Runner] = _load(runners.load, "runner", settings.runner.name)
    return runner


def _load(load: Callable[[str], type[Any]], group: str, name: str) -> Any:
    try:
        found = load(name)
    except LookupError as error:
        raise ConfigError(group, str(error)) from error
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "perfsearch"):
            raise
        raise ConfigError(
            group,
            f"{group}={name}: needs the package {missing}, which is not installed. "
            f"Install it, or choose another {group}.",
        ) from error
    for package, extra in found.requires.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                group,
                f"{group}={name}: needs the package {package}, which is not installed. "
                f"Run: {how_to_install(package, extra)}",
            )
    return found


_OWN_MODE = ".perfsearch"
"""Left where a mode without a search, such as ``estimate``, was the first to write."""

_MARKS = (JOURNAL, ".lock", _OWN_MODE)
"""Files that a directory has which a search worked in, or may work in."""


def check_directory(settings: Settings) -> str:
    """A file in the run directory that is not perfsearch's; empty: there is none.

    Raises:
        ConfigError: it cannot be written, or the user named one that holds something else.

    """
    directory = settings.run_dir or default_run_dir(settings)
    _require_writable(directory)
    foreign = _foreign_file(directory)
    if foreign and settings.run_dir is not None and settings.mode in _PIPELINE_MODES:
        raise ConfigError(
            "run_dir",
            f"run_dir={directory}: it holds {foreign!r} and no search of perfsearch, and files of "
            "a search would be written among them. Name a new or an empty directory.",
        )
    return foreign


def _require_writable(directory: Path) -> None:
    """Refuse a run directory that cannot be made or written, without making it."""
    why = why_not_writable(directory)
    if why:
        raise ConfigError(
            "run_dir", f"run_dir={directory}: {why}. Set run_dir=DIRECTORY to one that can."
        )


def _foreign_file(directory: Path) -> str:
    """A file that is not perfsearch's, with which those of a search would mix; or empty."""
    if not directory.is_dir() or any((directory / mark).exists() for mark in _MARKS):
        return ""
    return next((path.name for path in sorted(directory.iterdir())), "")


def _absent(directory: Path) -> list[Path]:
    """The directory and those above it, as far as they are not there; the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def _remove_unused(made: list[Path]) -> None:
    """Remove directories of a search that was refused before it wrote anything but its lock."""
    with suppress(OSError):  # one that holds something
        if made:
            (made[0] / "logs").rmdir()
            if [path.name for path in made[0].iterdir()] == [".lock"]:
                (made[0] / ".lock").unlink()
        for path in made:
            path.rmdir()


# -----------------------------------------------------------------------------
# The search: directory and devices are held, and its parts closed however it ends.


class Course:
    """What happens once a session is open: that of a search; what else uses one has its own."""

    def stages(self, session: Session) -> Result:
        """Go through the stages, except the record, and say what came of them."""
        return _stages(session)

    def close_record(self, session: Session, result: Result) -> None:
        """Write every file, finish the MLflow view, and show the end."""
        record.close_record(session, result)

    def interrupted(self, session: Session) -> None:
        """Keep and show what there is where it is ended from outside."""
        record.interrupted(session)


def search(
    settings: Settings,
    runner: Runner,
    strategy_factory: StrategyFactory,
    view: View,
    tracker_factory: TrackerFactory = open_tracker,
    course: Course | None = None,
) -> Result:
    """Run a search from its start, or from where an earlier run of it ended, to its record.

    Args:
        settings: the checked configuration; after a finished search in its ``run_dir`` a
            numbered neighbour is used.
        runner: what measures; closed when this returns or raises.
        strategy_factory: builds the strategy from space and hints.
        view: what shows progress.
        tracker_factory: builds the MLflow view from the settings, the directory and the
            search's identifier.
        course: what happens once all is open; by default a search.

    Raises:
        BadInputError: it may not start; nothing was started.
        Interrupted: a signal came; finished trials are recorded first.
    """
    begin, course = time.monotonic(), course or Course()
    launcher = launchers.of(getattr(runner, "environment", None))
    with ExitStack() as stack:
        stack.enter_context(compiled_once(runner, launcher.nnodes))
        stack.callback(launcher.close)
        stack.callback(_close, runner)
        try:
            session = _open(stack, settings, runner, strategy_factory, view, tracker_factory)
        except Exception as error:
            if not shortage.remedy(error):
                raise
            view.warning(_how_to_go_on(error))
            directory = settings.run_dir or default_run_dir(settings)
            return Result(ExitCode.CIRCUIT_BREAKER, directory, [], reason=str(error))
        try:
            record.open_record(session)
            result = course.stages(session)
            result.seconds = time.monotonic() - begin
            result.objective = session.objective
            course.close_record(session, result)
            result.mlflow_run_id = session.tracker.run_id
            session.journal.append(
                "ended", unix_s=time.time(), exit_code=result.exit_code, reason=result.reason
            )
        except BaseException as error:
            with suppress(OSError):  # what ended the search is told, not what its end lacks
                _close(runner)  # no process waits for the view to be finished
            if isinstance(error, BadInputError):  # the same command would be refused again
                record.name_changed_files(session)
                session.tracker.close("FAILED")
                raise
            if not shortage.remedy(error):
                course.interrupted(session)
                raise
            view.warning(_how_to_go_on(error))
            course.interrupted(session)
            return Result(
                ExitCode.CIRCUIT_BREAKER, session.run_dir, session.trials, reason=str(error)
            )
        return result


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Names the directory where torch keeps what it has compiled, Triton's kernels and what was tuned
for them among it."""


@contextmanager
def compiled_once(runner: Runner, nnodes: int = 1) -> Iterator[None]:
    """Have every start of a search find what an earlier one has compiled, and leave nothing of it.

    torch's own place is one for all programs of the user: there a trial's seconds of compiling
    would depend on what ran before, and nothing is removed. It is used all the same where it was
    set, where other nodes have none of this one's files, and where compiling is the script's own
    doing, since what it compiles may be there already.
    """
    compiles = COMPILE.name in runner.space.by_name or is_compiled(runner.pinned)
    if not compiles or nnodes > 1 or _COMPILED in os.environ:
        yield
        return
    with temporary_directory() as directory:
        os.environ[_COMPILED] = str(directory)
        try:
            yield
        finally:
            os.environ.pop(_COMPILED, None)


def _open(
    stack: ExitStack,
    settings: Settings,
    runner: Runner,
    strategy_factory: StrategyFactory,
    view: View,
    tracker_factory: TrackerFactory,
) -> Session:
    """Put the parts of a search together; ``stack`` closes what is opened here."""
    asked = settings.run_dir or default_run_dir(settings)
    named = settings.run_dir is not None
    directory, resuming = resume.choose_run_dir(asked.absolute(), settings.resume, named)
    if directory != asked.absolute():
        goes_on = command.given().key("resume=extend")
        view.note(
            f"{show_path(asked)} holds a finished search; this is a new one, in "
            f"{show_path(directory)} ({goes_on} goes on with the finished one)"
        )
    absent = _absent(directory)
    make_private(directory)
    make_private(directory / "logs")
    stack.enter_context(run_directory_lock(directory, view.warning))
    stack.callback(_remove_unused, absent)
    places = settings.limits.lock_directory
    stack.enter_context(device_lock(_device_set(runner), view.note, places))
    occupied = occupants(runner.hardware.all_gpus) if isinstance(runner, HoldsDevices) else ""
    if occupied:  # no search of this host, as that would hold the lock
        view.warning(f"{occupied}: what runs beside it is measured too. Wait for it, or end it")
    for caution in runner.cautions:
        view.warning(caution)
    reap_groups(directory)
    for beside in resume.numbered(asked.absolute()):  # may have been killed, and not gone on with
        reap_groups(beside, of_others=True)
    if isinstance(runner, HoldsDevices):
        launchers.of(runner.environment).open(runner.hardware, view.note)
    runner.open(directory)
    defined = resume.search_definition(settings, runner)
    prior = transfer.find(settings, runner, defined, directory / JOURNAL if resuming else None)
    journal = resume.open_journal(directory, settings, runner, resuming)
    stack.callback(journal.close)
    resume.require_start(runner, journal)
    if journal.dropped_line:
        view.warning(f"{journal.path}: dropped a line that was torn: {journal.dropped_line!r}")
    tracker = tracker_factory(settings, directory, str(journal.header["search_id"]))
    trials: list[Trial] = []  # the runner's hints read this very list as it grows
    hints = replace(runner.hints(trials), prior_search=prior.prior_search)
    strategy = strategy_factory(runner.space, hints)
    stack.callback(_close, strategy)
    session = Session(settings, runner, strategy, journal, view, tracker, directory, trials, prior)
    programs = OtherPrograms(directory)
    strategy.open(Surroundings(directory, session.budget_left, programs))
    session.sampler = _start_sampler(settings, runner)
    if session.sampler is not None:
        stack.callback(session.sampler.stop)
    return session


def _start_sampler(settings: Settings, runner: Runner) -> SystemSampler | None:
    """Sample this node while real devices are used; a replay has none."""
    devices = [name for name in _device_set(runner).split(",") if name]
    if not devices:
        return None
    from perfsearch.metrics.system import SystemSampler

    uuids = [name for name in devices if name != "cpu"]
    sampler = SystemSampler(settings.metrics.interval_s, uuids, [os.getpid()])
    sampler.start()
    launchers.of(getattr(runner, "environment", None)).sample(settings.metrics.interval_s)
    return sampler


def _device_set(runner: Runner) -> str:
    """Names of what no other search may use at the same time; empty: nothing."""
    return runner.device_set() if isinstance(runner, HoldsDevices) else ""


def _close(part: Runner | Strategy) -> None:
    with deferred():
        part.close()


def _how_to_go_on(error: BaseException) -> str:
    return f"{shortage.told(error)}, then give the same command to go on."


# -----------------------------------------------------------------------------
# The stages, in their order.


def _stages(session: Session) -> Result:
    """Go through them, except the record, and say what the search came to."""
    exit_code, verdict = ExitCode.DONE, Verdict()
    session.view.card(cards.opening(session))
    confirm.caution(session)
    profiled = session.settings.mode == "profile"
    start_record(session)  # stage 1
    try:
        baseline.run(session)  # stage 2
        reason = PROFILED if profiled else baseline.reason_to_stop(session)
        if not reason:
            neighbours.run(session)
            reason = explore.run(session)  # stage 3
    except BreakerError as error:
        exit_code, reason = ExitCode.CIRCUIT_BREAKER, str(error)
        session.view.warning(f"search ended: {reason}")
    else:
        if not profiled:  # the verdict says the same
            session.view.note(f"search ended: {reason}")
    finally:
        _close(session.strategy)  # nothing of it runs beside the confirmation
    if not any(t.status is Status.OK for t in session.trials):
        exit_code = ExitCode.NO_TRIAL_SUCCEEDED
        verdict.reason = _nothing_succeeded(session)
    elif profiled:
        verdict.reason = PROFILED
    elif again := _fails_again(session):
        exit_code = ExitCode.NO_TRIAL_SUCCEEDED
        verdict.reason = (
            f"the job as it is ran once, and started again it ended {again.status}: "
            f"{again.reason}. No other configuration ran either. Mend that first: it may be what a "
            "start leaves behind"
        )
    else:
        verdict = confirm.run(session)  # stage 4
        verdict.reason += _slow_steps(session)
    best = session.runner.baseline
    if verdict.winner is not None:
        best = session.numbered(verdict.winner).configuration
    whole: dict[str, object] = {**session.runner.pinned, **best}
    return Result(exit_code, session.run_dir, session.trials, verdict, whole, dict(best), reason)


def start_record(session: Session) -> None:
    """Show what the search starts from, and bring it to where its journal ends."""
    for remark in (*session.runner.remarks, *session.runner.rule_lines()):
        session.view.note(remark)
    if session.transfer.line:
        session.view.note(session.transfer.line)
    if session.transfer.warning:
        session.view.warning(session.transfer.warning)
    line = resume.restore(session)
    if line:
        session.view.note(line)
    session.journal.hold_no_more()


def _slow_steps(session: Session) -> str:
    """What slow steps cost the baseline, for the verdict's line; empty where they cost little."""
    trial = session.baseline
    if trial is None or trial.measurement is None:
        return ""
    kinds = trial.measurement.environment.get(SLOW_STEPS, [])
    least = session.settings.metrics.thresholds.uneven
    most = told_shortly([kind for kind in kinds if kind["share"] > least])
    return f"; {most}" if most else ""


def _fails_again(session: Session) -> Trial | None:
    """The baseline's second start, where it failed by itself, and all else that was tried too."""
    if any(t.status is Status.OK for t in (*session.search_trials, *session.sentinels)):
        return None
    own = [t for t in session.sentinels if t.status.has_failed and not t.status.is_from_outside]
    return own[0] if own and session.search_trials else None


def _nothing_succeeded(session: Session) -> str:
    trials, advice = session.trials, _next_step(session)
    reason = "no trial succeeded: none was started"
    if trials:
        counts = Counter(str(t.status) for t in trials)
        causes = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        first = next((t for t in trials if t.log_path), trials[0])
        log = f"; full log of trial {first.number}: {first.log_path}" if first.log_path else ""
        reason = f"no trial succeeded: {causes}; the first: {first.reason}{log}"
    return f"{reason}. {advice}" if advice else reason


def _next_step(session: Session) -> str:
    """What to do where no trial succeeded."""
    runner, baseline_trial = session.runner, session.baseline
    advice = runner.advice(session.trials) if isinstance(runner, Advises) else ""
    if baseline_trial is None or baseline_trial.status is Status.OOM:
        return advice
    if baseline_trial.status is Status.TIMEOUT:
        limit_s = session.settings.limits.trial_s
        more = f"If it is only slow, raise limits.trial_s={limit_s:g}"
        return f"{advice}. {more}" if advice else more
    return advice or "See that the job runs as it is today, then give the same command again"
