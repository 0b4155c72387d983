"""Stage 5: what is handed over: files in the run directory, and the MLflow view of them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.config.schema import to_plain
from perfsearch.core import command
from perfsearch.core.files import write_text
from perfsearch.core.journal import JOURNAL
from perfsearch.core.knob import Value
from perfsearch.core.trial import Measurement, Status, Trial
from perfsearch.core.version import version
from perfsearch.pipeline import baseline, cards, profile
from perfsearch.pipeline.session import BASELINE, Result, Session, Verdict
from perfsearch.runners.base import ClosingLines, HoldsDevices, KeepsFiles
from perfsearch.tracking import export, names, report
from perfsearch.tracking.best_so_far import course, first_within

_ARTIFACTS = (
    "config.yaml",
    JOURNAL,
    "trials.csv",
    "report.html",
    "comparison.json",
    export.SYSTEM_SERIES,
    "best",
    "trace",
    "logs",
)


def open_record(session: Session) -> None:
    """Write what was asked for, and begin the MLflow view."""
    export.write_config(session.run_dir / "config.yaml", to_plain(session.settings))
    session.tracker.open(session.journal)


def close_record(session: Session, result: Result) -> None:
    """Write every file, finish the MLflow view, and show the closing table."""
    runner = session.runner
    searched = session.settings.mode == "search"
    files = _best_files(session, result) if searched and result.exit_code != 1 else []
    write_views(session, result.verdict)
    traces = profile.keep_traces(session, result.verdict)
    append_summary(session, result.verdict, _tags(session, result), _note(session, result))
    files += traces
    for text in profile.explanations(session, result.verdict)[1:]:  # the baseline's was said before
        session.view.note(text)
    session.view.note(break_even_line(session, result.verdict))
    missing = {} if session.sampler is None else dict(session.sampler.unsupported)
    if not (isinstance(runner, HoldsDevices) and runner.hardware.all_gpus):
        missing.pop("gpu", None)  # nobody asked for one
    if missing:
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(missing.items()))
        session.view.note(f"system metrics that are unavailable here: {listed}")
    if session.settings.batch == "free":
        session.view.note(batch_line(session, result))
    if result.exit_code != 1 and isinstance(runner, ClosingLines):
        for line in runner.closing_lines(_best_configuration(session, result), session.trials):
            session.view.note(line)
    name_changed_files(session)
    if searched:
        session.view.result(_rows(session, result.verdict))
    session.tracker.close(names.mlflow_status_of_search(result.exit_code))
    session.view.card(cards.closing(session, result, files, session.tracker.how_to_open()))


def write_views(session: Session, verdict: Verdict) -> None:
    """Write the trials as a table and as a page, and the system metrics."""
    run_dir, runner = session.run_dir, session.runner
    export.write_trials(run_dir, session.trials, runner.space.knobs, runner.pinned)
    report.write_report(
        run_dir / "report.html",
        session.trials,
        verdict,
        session.objective,
        title=f"perfsearch {run_dir.name}",
        job=_job(session),
        snippets=_snippets(run_dir),
        ended_s={
            event.data["trial"]["number"]: event.data["unix_s"]
            for event in session.journal.events
            if event.name == "finished" and "unix_s" in event.data
        },
        system_series=_keep_series(session),
        memory_limit_gib=runner.hints(session.trials).memory_limit_gib,
        headroom=baseline.headroom(session),
        knobs=runner.space.knobs,
    )


_LABELS = {"workload": "job", "world_size": "ranks", "gpu": "devices"}

_LARGEST_SNIPPET = 20_000
"""Characters of a file that the report shows to be copied."""


def _job(session: Session) -> dict[str, str]:
    """What was searched, on what and when, by label."""
    settings, started_s = session.settings, session.journal.header.get("started_unix_s")
    found = {"search": f"runner={settings.runner.name} strategy={settings.strategy.name}"}
    for name, value in session.runner.identity().items():
        if value:
            found[_LABELS.get(name, name.replace("_", " "))] = value.strip("/")
    given = command.given()
    words = [*given.ranks_given, *given.options, *given.script]
    if words:
        found["command"] = shlex.join([given.name, *words])
    if started_s:
        found["started"] = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(started_s))
    return found | {"perfsearch": version(), "directory": str(session.run_dir)}


def _snippets(run_dir: Path) -> list[tuple[str, str]]:
    """What applies the result, by what it is: the files that were written for that."""
    directory, found = run_dir / "best" / "apply", []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.stat().st_size <= _LARGEST_SNIPPET:
            with contextlib.suppress(UnicodeDecodeError):
                found.append((f"{path.relative_to(run_dir)}", path.read_text().strip()))
    return found


def append_summary(session: Session, verdict: Verdict, tags: Mapping[str, str], note: str) -> None:
    """Journal what came of it, and which files MLflow is to have."""
    summary = summarise(session, verdict)
    session.journal.append(
        "summarised",
        unix_s=time.time(),
        numbers={name: value for name, value in summary.items() if math.isfinite(value)},
        tags=dict(tags),
        note=note,
        files=[name for name in _ARTIFACTS if (session.run_dir / name).exists()],
    )


def name_changed_files(session: Session) -> None:
    """Name files of the user's that are not as they were, however the search ended."""
    runner = session.runner
    if isinstance(runner, KeepsFiles) and (line := runner.not_as_before()):
        session.view.note(line)


def interrupted(session: Session) -> None:
    """Keep and show the finished trials of a search that is being ended from outside."""
    # What ended the search is on its way up; a full disk must not take its place.
    with contextlib.suppress(OSError):
        os.stat(session.journal.path)  # a directory that was removed is not made again
        knobs, pinned = session.runner.space.knobs, session.runner.pinned
        export.write_trials(session.run_dir, session.trials, knobs, pinned)
        _keep_series(session)
    name_changed_files(session)
    done = [t for t in session.trials if t.status is not Status.INTERRUPTED]
    many = f"{len(done)} trial{'s' * (len(done) != 1)}"
    session.view.result(_rows(session, Verdict()))
    text = f"interrupted after {many}; the same command goes on from here"
    session.view.card(cards.interrupted(session, text))
    session.tracker.close("KILLED")


def _best_files(session: Session, result: Result) -> list[str]:
    directory = session.run_dir / "best"
    winner = result.verdict.winner
    number = 0 if winner is None else winner
    trial = session.find(number)
    best = _best_configuration(session, result)
    plain = to_plain(session.settings)
    plain["runner"].update(session.runner.settings_of(best))
    plain.update(run_dir=None, resume="auto")  # fed back it is a search of its own
    export.write_config(directory / "config.yaml", plain)
    summary = {
        "verdict": result.verdict.reason,
        "is_baseline": result.is_baseline,
        "trial": number,
        "log": "" if trial is None else trial.log_path,
        "knobs": result.best,
        "speed_up": None if result.verdict.interval is None else vars(result.verdict.interval),
        "batch": session.settings.batch,
        "numbers": summarise(session, result.verdict),
        "repeats": {
            "baseline" if arm == BASELINE else str(arm): [
                session.objective.from_cost(c) for c in cs
            ]
            for arm, cs in result.verdict.costs.items()
        },
        "unit": session.unit,
    }
    origin = {**export.provenance(), "identity": session.runner.identity()}
    export.write_summary(directory / "summary.json", summary, origin)
    written = session.runner.export(best, directory / "apply")
    for path in (p for p in directory.rglob("*") if p.is_file()):
        path.chmod(path.stat().st_mode & 0o700)  # changed copies of the user's files are among them
    return [str(p) for p in (directory / "config.yaml", directory / "summary.json", *written)]


def _best_configuration(session: Session, result: Result) -> dict[str, Value]:
    """What is handed over: the winner's, or the baseline's."""
    trial = session.find(result.verdict.winner or 0)
    return dict(session.runner.baseline) if trial is None else trial.configuration


def _tags(session: Session, result: Result) -> dict[str, str]:
    winner = result.verdict.winner
    found = cards.outcome(result)
    said = names.GAIN if found is cards.Outcome.FASTER else str(found)
    return {
        "perfsearch.verdict": said if session.settings.mode == "search" else names.NOT_SEARCHED,
        "perfsearch.best_trial": str(0 if winner is None else winner),
        "perfsearch.ended": result.reason,
        **profile.bottleneck_tags(session, result.verdict),
    }


def _note(session: Session, result: Result) -> str:
    lines = [result.verdict.reason, f"search ended: {result.reason}"]
    lines += profile.explanations(session, result.verdict)
    if session.settings.batch == "free":
        lines.append(batch_line(session, result))
    return "\n\n".join(line for line in lines if line)


# -----------------------------------------------------------------------------
# The closing table.


def _rows(session: Session, verdict: Verdict) -> list[dict[str, Any]]:
    """Rows of the closing table: the baseline, then the finalists, or the best of single readings.

    That is not called the best where the baseline is faster.
    """
    rows = []
    baseline = session.baseline
    if baseline is not None:
        rows.append(_row(session, "baseline", baseline, verdict, None))
    fastest = sorted(verdict.intervals, key=lambda n: -verdict.intervals[n].ratio)
    shown = [t for n in fastest if (t := session.find(n)) is not None]
    if not shown and verdict.winner is not None:
        shown = [session.numbered(verdict.winner)]
    if not shown:  # one reading each
        shown = [session.numbered(arm) for arm, c in verdict.costs.items() if c and arm != BASELINE]
    if not shown and session.best is not None:
        shown = [session.best]
    for trial in shown:
        interval = verdict.intervals.get(trial.number)
        if trial.number == verdict.winner:
            label = "best"
        elif interval:
            label = "finalist"
        else:
            label = "best so far" if _is_faster(session, trial, verdict) else "fastest other"
        rows.append(_row(session, label, trial, verdict, interval))
    return rows


def _is_faster(session: Session, trial: Trial, verdict: Verdict) -> bool:
    """Whether a trial's reading is better than the baseline's, where that has one.

    Readings of a confirmation that came to no interval count before those of the search.
    """
    own = _cost(session, trial, verdict.costs.get(trial.number))
    before = _cost(session, session.baseline, verdict.costs.get(BASELINE))
    return own is None or before is None or own < before


def _cost(session: Session, trial: Trial | None, costs: list[float] | None) -> float | None:
    """By a confirmation's readings, else by those of the search: the baseline has several."""
    if costs:
        return statistics.median(costs)
    return session.baseline_cost if trial is None or trial is session.baseline else trial.cost


def _row(
    session: Session, label: str, trial: Trial, verdict: Verdict, interval: Any
) -> dict[str, Any]:
    costs = verdict.costs.get(BASELINE if trial is session.baseline else trial.number)
    cost = _cost(session, trial, costs)
    steps_s = [m.step_time_s for m in _measured(session, trial, verdict, bool(costs))]
    return {
        "label": label,
        "trial": trial,
        "objective": None if cost is None else session.objective.from_cost(cost),
        "step_ms": 1e3 * statistics.median(steps_s) if steps_s else None,
        "unit": session.unit,
        "interval": interval,
        "confirmed": bool(costs),
    }


def _measured(
    session: Session, trial: Trial, verdict: Verdict, confirmed: bool
) -> list[Measurement]:
    """What a row's numbers are of; steps of different windows may be of different work."""
    if confirmed:
        return session.confirmed(verdict, trial.number)[trial.number]
    again = session.sentinels if trial is session.baseline else ()
    found = [t.measurement for t in (trial, *again) if t.cost is not None]
    return [measured for measured in found if measured is not None]


# -----------------------------------------------------------------------------
# The numbers by which whole searches are compared, and lines about a search as a whole.


def summarise(session: Session, verdict: Verdict) -> dict[str, float]:
    """The numbers by which whole searches are compared, by MLflow metric name."""
    numbers: dict[str, float] = {}
    handed_over = _handed_over_cost(session, verdict)
    if handed_over is not None:  # the UI's views begin with the first one
        numbers["objective/value"] = session.objective.from_cost(handed_over)
    numbers |= {
        "search/seconds": session.search_seconds,
        "search/trials": len(session.search_trials),
        "search/failed_trials": sum(t.status.has_failed for t in session.search_trials),
        "search/screened": session.screened,
        "confirm/seconds": sum(t.seconds for t in (*verdict.chosen_by, *verdict.trials)),
    }
    within = trials_until_within(session.search_trials, 0.02)
    if within is not None:
        numbers["search/trials_until_within_2_percent"] = within
    interval = verdict.interval
    if interval is not None:
        numbers["search/speed_up"] = interval.ratio
        if interval.is_told:
            numbers["search/speed_up_low"] = interval.low
            numbers["search/speed_up_high"] = interval.high
    headroom = baseline.headroom(session)
    if headroom is not None and math.isfinite(headroom):
        numbers["search/speed_up_bound"] = 1 + headroom
    warm = [t.overhead_seconds for t in session.search_trials if not t.fresh_process]
    if warm:
        numbers["search/warm_trial_overhead_s"] = statistics.median(warm)
    return numbers


def trials_until_within(trials: Sequence[Trial], fraction: float) -> int | None:
    """Number of search trials after which the best reading was within ``fraction`` of the last."""
    reached = course(trials)
    found = first_within(reached, reached[-1].cost, fraction) if reached else None
    return None if found is None else found.trials


def _handed_over_cost(session: Session, verdict: Verdict) -> float | None:
    arm = BASELINE if verdict.winner is None else verdict.winner
    costs = verdict.costs.get(arm)
    if costs:
        return statistics.median(costs)
    return session.baseline_cost


def break_even_line(session: Session, verdict: Verdict) -> str:
    """After how many steps of training the search has paid for itself; empty without a gain."""
    if verdict.winner is None or BASELINE not in verdict.costs:
        return ""
    measured = session.confirmed(verdict, verdict.winner)
    steps = {arm: statistics.median(m.step_time_s for m in each) for arm, each in measured.items()}
    samples = {arm: each[0].samples_per_step for arm, each in measured.items()}
    # with batch=free a step of the one may train more than a step of the other
    share = (samples[BASELINE] or 1) / (samples[verdict.winner] or 1)
    saved_s = steps[BASELINE] - share * steps[verdict.winner]
    spent_s = sum(t.seconds for t in session.trials)
    if saved_s <= 0 or not session.runner.trains:
        return ""
    needed = math.ceil(spent_s / saved_s)
    which = f"step{'s' * (needed != 1)}"
    which += "" if share == 1 else f" of {samples[BASELINE]} samples"
    return (
        f"the search took {spent_s:.0f} s of trials and has paid for itself after {needed} {which}"
    )


def batch_line(session: Session, result: Result) -> str:
    """What became of the global batch, which ``batch=free`` lets change."""
    numbers = (0, result.verdict.winner or 0)
    trials = [session.find(n) for n in numbers]
    sizes = [t.measurement.samples_per_step if t and t.measurement else None for t in trials]
    if None in sizes or sizes[0] == sizes[1]:
        return "batch=free: the global batch may differ from the baseline's"
    return f"batch=free: the global batch is {sizes[1]}, the baseline's is {sizes[0]}"


# -----------------------------------------------------------------------------
# System metrics over time, of all sessions of a search.


def _keep_series(session: Session) -> list[dict[str, Any]]:
    samples = [] if session.sampler is None else session.sampler.series()
    epoch_s = time.time() - time.monotonic()  # the samples' clock is the monotonic one
    timed = [{**sample, "unix_s": round(epoch_s + sample["time_s"], 3)} for sample in samples]
    return keep_series(session.run_dir, timed, session.settings.metrics.interval_s)


def keep_series(
    run_dir: Path, samples: Sequence[Mapping[str, Any]], interval_s: float
) -> list[dict[str, Any]]:
    """Write this session's samples behind those of earlier ones, and return all of them.

    Earlier ones are moved to end right before this session: what lies between is no part of the
    search. Their clock ends with the machine's; what another boot left is not kept.

    Raises:
        OSError: the file cannot be written.

    """
    path = run_dir / export.SYSTEM_SERIES
    earlier: list[dict[str, Any]] = []
    if not samples:
        return []
    if path.exists():
        begin = float(samples[0]["time_s"])
        try:
            known = [json.loads(line) for line in path.read_text().splitlines()]
            earlier = [sample for sample in known if sample["time_s"] < begin]
        except (ValueError, KeyError, TypeError):
            earlier = []  # edited by hand: a picture is not worth the end of a search
        if earlier:
            shift = begin - interval_s - max(sample["time_s"] for sample in earlier)
            earlier = [{**sample, "time_s": sample["time_s"] + shift} for sample in earlier]
    every = [*earlier, *map(dict, samples)]
    write_text(path, "".join(json.dumps(sample) + "\n" for sample in every), durable=True)
    return every
