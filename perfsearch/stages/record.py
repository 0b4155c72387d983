"""Stage 5: what is handed over: files in the run directory, and the MLflow view of them."""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Any

from perfsearch.config import to_plain
from perfsearch.core.journal import JOURNAL
from perfsearch.core.knob import Value
from perfsearch.core.trial import Status, Trial
from perfsearch.stages import gains, looks
from perfsearch.stages.session import BASELINE, Session, Verdict
from perfsearch.stages.summary import batch_line, break_even_line, summarise, trial_cost_lines
from perfsearch.stages.system_series import SYSTEM_SERIES, keep_series
from perfsearch.tracking import export, report
from perfsearch.tracking.provenance import provenance

if TYPE_CHECKING:
    from perfsearch.stages.session import Result


_ARTIFACTS = (
    "config.yaml",
    JOURNAL,
    "trials.csv",
    "report.html",
    SYSTEM_SERIES,
    "best",
    "trace",
    "logs",
)


def open_record(session: Session) -> None:
    """Write what was asked for, and begin the MLflow view."""
    settings, runner = session.settings, session.runner
    export.write_config(session.run_dir / "config.yaml", to_plain(settings))
    session.tracker.open(
        parameters={
            "runner": settings.runner.name,
            "strategy": settings.strategy.name,
            "workload": settings.workload.name,
            "seed": settings.seed,
            "numerics": str(settings.numerics),
            "batch": settings.batch,
            **{f"identity/{k}": v for k, v in runner.identity().items()},
            **{f"pinned/{k}": v for k, v in runner.pinned.items()},
        },
        tags={"perfsearch.run_dir": str(session.run_dir)},
        knobs=runner.space.knobs,
    )


def close_record(session: Session, result: Result) -> None:
    """Write every file, finish the MLflow view, and show the closing table."""
    run_dir, runner = session.run_dir, session.runner
    export.write_trials(run_dir, session.trials, runner.space.knobs, runner.pinned)
    searched = session.settings.mode == "search"
    files = _best_files(session, result) if searched and result.exit_code != 1 else []
    summary = summarise(session, result.verdict)
    series = _keep_series(session)
    report.write_report(
        run_dir / "report.html",
        session.trials,
        result.verdict,
        session.objective,
        title=f"perfsearch {run_dir.name}",
        system_series=series,
        memory_limit_gib=runner.hints(session.trials).memory_limit_gib,
        bound=gains.bound(session),
        knobs=runner.space.knobs,
    )
    traces = looks.keep_traces(session, result.verdict)
    session.tracker.summary(summary, tags=_tags(session, result), note=_note(session, result))
    session.tracker.artifacts([run_dir / name for name in _ARTIFACTS if (run_dir / name).exists()])
    files += traces
    for text in looks.explanations(session, result.verdict)[1:]:  # the baseline's was said before
        session.view.note(text)
    for line in [*trial_cost_lines(session.trials), break_even_line(session, result.verdict)]:
        session.view.note(line)
    missing = {} if session.sampler is None else session.sampler.unsupported
    if missing:
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(missing.items()))
        session.view.note(f"system metrics that are not to be had here: {listed}")
    if session.settings.batch == "free":
        session.view.note(batch_line(session, result))
    if result.exit_code != 1:
        for line in runner.closing_lines(_best_configuration(session, result), session.trials):
            session.view.note(line)
    session.view.result(_rows(session, result.verdict), result.verdict.reason, files)
    session.tracker.close("FINISHED" if result.exit_code == 0 else "FAILED")
    session.view.note(session.tracker.how_to_open())


def interrupted(session: Session) -> None:
    """Keep and show the finished trials of a search that is being ended from outside."""
    # What ended the search is on its way up; a full disk must not take its place.
    with contextlib.suppress(OSError):
        knobs, pinned = session.runner.space.knobs, session.runner.pinned
        export.write_trials(session.run_dir, session.trials, knobs, pinned)
        _keep_series(session)
    done = [t for t in session.trials if t.status is not Status.INTERRUPTED]
    session.view.result(
        _rows(session, Verdict()),
        f"interrupted after {len(done)} trials; the same command goes on from here",
        [],
    )
    session.tracker.close("KILLED")


def _keep_series(session: Session) -> list[dict[str, Any]]:
    samples = [] if session.sampler is None else session.sampler.series()
    return keep_series(session.run_dir, samples, session.settings.metrics.interval_s)


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
        "is_baseline": winner is None,
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
        "unit": session.objective.unit,
    }
    origin = {**provenance(), "identity": session.runner.identity()}
    export.write_summary(directory / "summary.json", summary, origin)
    written = session.runner.export(best, directory / "apply")
    return [str(p) for p in (directory / "config.yaml", directory / "summary.json", *written)]


def _best_configuration(session: Session, result: Result) -> dict[str, Value]:
    """What is handed over: the winner's, or the baseline's."""
    trial = session.find(result.verdict.winner or 0)
    return dict(session.runner.baseline) if trial is None else trial.configuration


def _rows(session: Session, verdict: Verdict) -> list[dict[str, Any]]:
    """Rows of the closing table: the baseline, then the finalists, or the best of single readings.

    That is not called the best where the baseline is faster.
    """
    rows = []
    baseline = session.baseline
    if baseline is not None:
        rows.append(_row(session, "baseline", baseline, verdict.costs.get(BASELINE), None))
    shown = [t for n in verdict.intervals if (t := session.find(n)) is not None]
    if not shown and verdict.winner is not None:
        shown = [session.numbered(verdict.winner)]
    if not shown and session.best is not None:
        shown = [session.best]
    for trial in shown:
        interval = verdict.intervals.get(trial.number)
        if trial.number == verdict.winner:
            label = "best"
        elif interval:
            label = "finalist"
        else:
            label = "best so far" if _is_faster(trial, baseline, verdict) else "fastest other"
        rows.append(_row(session, label, trial, verdict.costs.get(trial.number), interval))
    return rows


def _is_faster(trial: Trial, baseline: Trial | None, verdict: Verdict) -> bool:
    """Whether a trial's reading is better than the baseline's, where that has one.

    Readings of a confirmation that came to no interval count before those of the search.
    """
    own = _cost(trial, verdict.costs.get(trial.number))
    before = None if baseline is None else _cost(baseline, verdict.costs.get(BASELINE))
    return own is None or before is None or own < before


def _cost(trial: Trial, costs: list[float] | None) -> float | None:
    return statistics.median(costs) if costs else trial.cost


def _row(
    session: Session, label: str, trial: Trial, costs: list[float] | None, interval: Any
) -> dict[str, Any]:
    cost = _cost(trial, costs)
    return {
        "label": label,
        "trial": trial,
        "objective": None if cost is None else session.objective.from_cost(cost),
        "unit": session.objective.unit,
        "interval": interval,
        "confirmed": bool(costs),
    }


def _tags(session: Session, result: Result) -> dict[str, str]:
    winner = result.verdict.winner
    return {
        "perfsearch.verdict": "gain" if winner is not None else "no gain",
        "perfsearch.best_trial": str(0 if winner is None else winner),
        "perfsearch.ended": result.reason,
        **looks.bottleneck_tags(session, result.verdict),
    }


def _note(session: Session, result: Result) -> str:
    lines = [result.verdict.reason, f"search ended: {result.reason}"]
    lines += looks.explanations(session, result.verdict)
    if session.settings.batch == "free":
        lines.append(batch_line(session, result))
    return "\n\n".join(line for line in lines if line)
