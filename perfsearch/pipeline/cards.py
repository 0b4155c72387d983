"""The two cards of a search: what it is about, before it; what came of it, and what to do next."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perfsearch.core import command
from perfsearch.core.figures import decimals, show_number, show_path, show_seconds, show_value
from perfsearch.core.knob import Knob, Value, same_value
from perfsearch.core.signals import ExitCode
from perfsearch.pipeline import confirm
from perfsearch.pipeline.session import BASELINE, Result, Session, Verdict
from perfsearch.runners.base import HoldsDevices
from perfsearch.workloads.spec import SCRIPT

MOST_KNOBS = 12
"""Knobs that the opening card lists; the others are counted."""

_MOST_VALUES = 6
"""Values of a knob that are shown, the others counted."""


@dataclass(frozen=True)
class Row:
    """One line of a card, or a few.

    Attributes:
        label: what it is; empty: it goes on with what is above.
        text: that is shown.
        is_command: whether it is to be pasted into a shell.

    """

    label: str
    text: str
    is_command: bool = False


@dataclass(frozen=True)
class Card:
    """A title, and labelled lines."""

    title: str
    rows: Sequence[Row]


class Outcome(StrEnum):
    """What a search came to, in a word or two."""

    FASTER = "faster"
    NO_GAIN = "no gain"
    INCONCLUSIVE = "inconclusive"
    """A gain that matters is neither shown nor excluded."""
    RESCUED = "runs now"
    """The baseline does not run, another configuration does."""
    FAILED = "failed"


def outcome(result: Result) -> Outcome:
    """What a search came to."""
    verdict = result.verdict
    if result.exit_code == ExitCode.NO_TRIAL_SUCCEEDED:
        return Outcome.FAILED
    if verdict.winner is not None:
        return Outcome.FASTER if verdict.winner in verdict.intervals else Outcome.RESCUED
    return Outcome.INCONCLUSIVE if verdict.is_open else Outcome.NO_GAIN


# -----------------------------------------------------------------------------
# Before it.


def opening(session: Session) -> Card:
    """What is searched, on what, within which limits, and where its files go."""
    settings, runner = session.settings, session.runner
    identity = runner.identity()
    rows = [Row("job", _job(session, identity))]
    if where := _where(session, identity):
        rows.append(Row("devices", where))
    if settings.mode == "search":
        rows += _parameters(runner.space.knobs, runner.baseline)
        rows.append(Row("strategy", f"{settings.strategy.name}, seed {settings.seed}"))
        rows.append(Row("budget", _budget(session)))
    rows.append(Row("directory", show_path(session.run_dir)))
    return Card(f"perfsearch {settings.mode}: runner={settings.runner.name}", rows)


def _job(session: Session, identity: dict[str, str]) -> str:
    settings = session.settings
    if settings.runner.options.get("table"):
        return f"recorded trials of {show_path(Path(str(settings.runner.options['table'])))}"
    named = identity.get("command") or identity.get("workload", settings.workload.name)
    if "command" not in identity and named.count("/") >= 2 and settings.workload.name != SCRIPT:
        name, size, factory = named.split("/", 2)
        named = factory or f"{name}, size {size}"
    batch = identity.get("global_batch")
    return named.removeprefix("script ") + (f", global batch {batch}" if batch else "")


def _where(session: Session, identity: dict[str, str]) -> str:
    if not isinstance(session.runner, HoldsDevices):
        return ""
    ranks, nodes = int(identity.get("world_size") or 1), session.settings.nnodes
    words = [f"{ranks} rank{'s' * (ranks > 1)} on {identity.get('gpu') or 'cpu'}"]
    words += [f"{nodes} nodes"] if nodes > 1 else []
    words += [f"torch {identity['torch']}"] if identity.get("torch") else []
    return ", ".join(words)


def _parameters(knobs: Sequence[Knob], today: dict[str, Value]) -> Iterator[Row]:
    shown = knobs[:MOST_KNOBS] if len(knobs) > MOST_KNOBS + 1 else knobs
    width = max((len(knob.name) for knob in shown), default=0)
    for place, knob in enumerate(shown):
        now = f" (today {show_value(today[knob.name])})" if knob.name in today else ""
        text = f"{knob.name:{width}}  {values_of(knob)}{now}"
        yield Row("parameters" if place == 0 else "", text)
    if len(shown) < len(knobs):
        yield Row("", f"and {len(knobs) - len(shown)} more")
    if not knobs:
        yield Row("parameters", "none is left to search")


def values_of(knob: Knob) -> str:
    """A knob's values: a range, or the first few of a list."""
    unit = f" {knob.unit}" if knob.unit else ""
    if knob.is_range:
        step = f", step {knob.step:g}" if knob.step and not knob.log else ""
        return f"{knob.low:g} to {knob.high:g}{unit}{' (log)' if knob.log else step}"
    more = len(knob.values) - _MOST_VALUES
    listed = ", ".join(map(show_value, knob.values[:_MOST_VALUES]))
    return f"{listed}{f' and {more} more' if more > 0 else ''}{unit}"


def _budget(session: Session) -> str:
    budget, pairs = session.settings.budget, session.settings.confirm
    limits = [f"{budget.trials} trials"] if budget.trials is not None else []
    limits += [show_seconds(budget.seconds)] if budget.seconds is not None else []
    limits += [f"{budget.gpu_hours:g} GPU hours"] if budget.gpu_hours is not None else []
    searching = " or ".join(limits) or "no limit"
    if not pairs.finalists or not pairs.max_repeats:
        return f"{searching}; nothing is confirmed"
    best = "the best" if pairs.finalists == 1 else f"the best {pairs.finalists}"
    longest = "" if pairs.seconds is None else f" or {show_seconds(pairs.seconds)}"
    return (
        f"{searching}; then {best} against the baseline, up to {pairs.max_repeats} pairs of "
        f"fresh starts{longest}"
    )


# -----------------------------------------------------------------------------
# After it.


def closing(session: Session, result: Result, files: Sequence[str], compare: str) -> Card:
    """The verdict, what changed, and what to do next.

    Args:
        session: of the search.
        result: what it came to.
        files: that were written for whoever uses the result.
        compare: how MLflow is opened, a line each; empty: nothing is there.

    """
    profiled = session.settings.mode == "profile"
    found = outcome(result)
    title = "profile" if profiled else f"result: {_headline(result.verdict, found)}"
    rows = [Row("verdict", result.verdict.reason)]
    if found in (Outcome.FASTER, Outcome.RESCUED) and not profiled:
        rows += _speeds(session, result.verdict)
        rows += _changed(session, result)
        rows += _use(session, result, files)
    traces = [file for file in files if "/trace/" in file]
    rows += [
        Row("trace" if place == 0 else "", show_path(Path(f))) for place, f in enumerate(traces)
    ]
    rows.append(Row("report", show_path(session.run_dir / "report.html")))
    for place, line in enumerate(compare.splitlines()):
        rows.append(Row("compare" if place == 0 else "", line, is_command=" ui " in line))
    if not profiled:
        rows += _more_certainty(session, result, found)
    return Card(title, rows)


def interrupted(session: Session, text: str) -> Card:
    """What is left of a search that was ended from outside."""
    rows = [Row("verdict", text), Row("go on", command.given().again(), is_command=True)]
    rows.append(Row("directory", show_path(session.run_dir)))
    return Card("interrupted", rows if command.given().is_known else [rows[0], rows[2]])


def _headline(verdict: Verdict, found: Outcome) -> str:
    if found is not Outcome.FASTER or verdict.winner is None:
        return str(found)
    return str(verdict.intervals[verdict.winner]).replace("(", "faster (", 1)


def _speeds(session: Session, verdict: Verdict) -> Iterator[Row]:
    """Baseline and best where they were measured side by side."""
    arms = (BASELINE, BASELINE if verdict.winner is None else verdict.winner)
    costs = [statistics.median(verdict.costs[arm]) for arm in arms if verdict.costs.get(arm)]
    if len(costs) == len(arms):
        before, after = map(session.objective.from_cost, costs)
        places = decimals(before)
        text = f"{show_number(before, places)} -> {show_number(after, places)} {session.unit}"
        yield Row("speed", text)


def _changed(session: Session, result: Result) -> Iterator[Row]:
    before = session.runner.baseline
    changed = [
        (name, before.get(name), value)
        for name, value in result.handed_over.items()
        if name not in before or not same_value(before[name], value)
    ]
    shown = changed[:MOST_KNOBS] if len(changed) > MOST_KNOBS + 1 else changed
    width = max((len(name) for name, _, _ in shown), default=0)
    for place, (name, old, new) in enumerate(shown):
        text = f"{name:{width}}  {show_value(old)} -> {show_value(new)}"
        yield Row("changed" if place == 0 else "", text)
    if len(shown) < len(changed):
        yield Row("", f"and {len(changed) - len(shown)} more of {len(result.handed_over)}")


def _use(session: Session, result: Result, files: Sequence[str]) -> Iterator[Row]:
    """How the result is put to use: a command for a script, else the files that say it."""
    config = show_path(session.run_dir / "best" / "config.yaml")
    words = _script_with_knobs(session, config)
    if words:
        yield Row("use it", shlex.join(words), is_command=True)
        return
    applied = [show_path(Path(file)) for file in files if "/apply/" in file]
    rows = [Row("", f"source {file}", True) for file in applied if file.endswith(".sh")]
    rows += [Row("", f"{file}: {_ABOUT.get(Path(file).suffix, 'for your job')}")
             for file in applied if not file.endswith(".sh")]  # fmt: skip
    for place, row in enumerate(rows or [Row("", f"{config} has the values")]):
        yield Row("use it" if place == 0 else "", row.text, row.is_command)


_ABOUT = {".py": "put these lines into your job", ".json": "give this file to your job"}


def _script_with_knobs(session: Session, config: str) -> list[str]:
    """``perfsearch-run --knobs`` for a search over a script; empty where nothing is like it."""
    workload, given = session.settings.workload, command.given()
    words = workload.options.get("command")
    if workload.name != SCRIPT or session.settings.nnodes > 1:
        return []
    if given.script:
        start = [w for w in given.options if w in ("-m", "--module", "--standalone")]
        script = list(given.script)
    elif isinstance(words, list | tuple) and words and str(words[0]).endswith(".py"):
        start = ["-m"] if workload.options.get("module") else []
        script = list(map(str, words))
    else:  # a launcher's command
        return []
    runner = session.runner
    ranks = runner.hardware.nproc if isinstance(runner, HoldsDevices) else 1
    many = [f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return ["perfsearch-run", "--knobs", config, *many, *start, *script]


def _more_certainty(session: Session, result: Result, found: Outcome) -> Iterator[Row]:
    """The command that goes on with this very search, for what it has left open."""
    verdict = result.verdict
    skipped = confirm.skipped(session) if found is Outcome.INCONCLUSIVE else {}
    keys: dict[str, float] = {}
    label = "more certainty"
    if skipped:
        keys = skipped if confirm.candidates(session) else {}
    elif found in (Outcome.FASTER, Outcome.INCONCLUSIVE) and verdict.costs:
        keys = confirm.larger_limits(session, verdict)
    elif found is Outcome.INCONCLUSIVE:  # the machine was busy, and its readings would stay
        yield Row("search again", command.given().again("resume=never"), is_command=True)
    elif found is Outcome.NO_GAIN and session.search_trials:
        keys, label = _larger_budget(session), "search on"
    if not keys:
        return
    words = [f"{key}={value:g}" for key, value in keys.items()]
    directory = f"run_dir={show_path(session.run_dir)}"
    text = command.given().again(directory, "resume=extend", *words)
    yield Row(label, text, is_command=True)


def _larger_budget(session: Session) -> dict[str, float]:
    """The limits of a search that its budget ended, doubled: a budget that was used up by more than
    its limit is what doubles. Empty where something else ended it, which no budget changes.
    """
    budget, devices = session.settings.budget, session.devices
    tried, seconds = len(session.search_trials), session.search_seconds
    if budget.spent(tried, seconds, devices) is None:
        return {}
    used = {"trials": tried, "seconds": seconds, "gpu_hours": seconds * devices / 3600}
    keys: dict[str, float] = {}
    for name, amount in used.items():
        if (limit := getattr(budget, name)) is not None:
            larger = 2 * max(limit, amount)
            keys[f"budget.{name}"] = larger if name == "gpu_hours" else math.ceil(larger)
    return keys
