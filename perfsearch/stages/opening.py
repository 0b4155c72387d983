"""Stage 1: find or make the run directory, and adopt what an earlier run finished."""

from __future__ import annotations

import itertools
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.runners.base import Runner
from perfsearch.search.errors import BadInputError
from perfsearch.search.journal import Event, Journal, JournalError, read
from perfsearch.search.knob import Value, same_value
from perfsearch.search.narrow import is_auto
from perfsearch.search.space import Space, key_of
from perfsearch.search.suggest import nearest
from perfsearch.search.trial import Purpose, Status, Trial
from perfsearch.stages.search import screened_trial

if TYPE_CHECKING:
    from perfsearch.config import Settings
    from perfsearch.stages.session import Session

JOURNAL = "journal.jsonl"


class RefusedError(BadInputError):
    """A search that must not start as asked; the message names the key and the remedy."""


def choose_run_dir(base: Path, resume: str, named: bool = False) -> tuple[Path, bool]:
    """The directory to work in, and whether it holds a search to go on with.

    ``base`` itself, or ``base-2``, ``base-3``, ... after finished searches. To run failed trials
    again it is the latest of them that has any; or ``base``, where the user ``named`` it and it
    does.

    Raises:
        RefusedError: ``resume=failed`` and there is nothing to resume.

    """
    taken = [path for path in _numbered(base) if (path / JOURNAL).exists()]
    if taken and resume == "failed":
        ordered = [*([base] if named and base in taken else []), *reversed(taken)]
        return next((path for path in ordered if _has_failed(path)), ordered[0]), True
    if resume == "failed":
        raise RefusedError(f"resume=failed: there is no journal in {base}.")
    if taken and resume == "auto":
        _, events = read(taken[-1] / JOURNAL)
        if not any(e.name == "ended" for e in _since_opened(events)):
            return taken[-1], True
    if not taken:
        return base, False
    last = re.search(r"-(\d+)$", taken[-1].name.removeprefix(base.name))
    return base.with_name(f"{base.name}-{int(last.group(1)) + 1 if last else 2}"), False


def _has_failed(run_dir: Path) -> bool:
    """Whether a finished search has trials that failed; read without a judgement on the rest."""
    _, events = read(run_dir / JOURNAL)
    ended = any(e.name == "ended" for e in _since_opened(events))
    return ended and bool(_failed(events))


def _failed(events: Sequence[Event]) -> list[int]:
    """Numbers of the trials whose last ending was a failure."""
    last: dict[int, str] = {}
    for event in events:
        if event.name == "finished":
            trial = event.data["trial"]
            last[trial["number"]] = trial["status"]
    return [n for n, status in last.items() if status in list(Status) and Status(status).has_failed]


def open_journal(run_dir: Path, settings: Settings, runner: Runner, resuming: bool) -> Journal:
    """Create the journal, or reopen one that this machine and job may go on with.

    Raises:
        JournalError: it cannot be read or written.
        RefusedError: model, world size, device or library versions differ from the journal's.

    """
    identity = runner.identity()
    for name in settings.resume_force:
        if name not in identity:
            allowed = nearest(name, identity) if identity else "This runner has none."
            raise RefusedError(f"resume_force=[{name}]: not part of what is compared. {allowed}")
    if not resuming:
        header = {"search_id": uuid.uuid4().hex, "started_unix_s": time.time()}
        return Journal(run_dir / JOURNAL, {**header, "identity": identity})
    journal = Journal.reopen(run_dir / JOURNAL)
    if settings.resume == "failed":
        reason = _why_not_again(journal)
        if reason:
            journal.close()
            raise RefusedError(f"resume=failed: {run_dir}: {reason}")
    before: dict[str, str] = journal.header.get("identity", {})
    for name in sorted(before.keys() | identity.keys()):
        if before.get(name) != identity.get(name) and name not in settings.resume_force:
            journal.close()
            raise RefusedError(
                f"{run_dir}: its trials were measured with {name}={before.get(name)}, and this is "
                f"{identity.get(name)}. Use resume=never for a new search, or "
                f"resume_force=[{name}] to mix them."
            )
    return journal


def _why_not_again(journal: Journal) -> str:
    """Why failed trials cannot be run again now; empty where they can."""
    if not journal.ended:
        return "the search is not finished. The same command without resume=failed goes on."
    if not _failed(journal.events):
        return "no trial of it failed, so there is nothing to run again."
    return ""


def definition(
    settings: Settings, runner: Runner, taken_over: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What decides the sequence of proposals, as plain values for the journal.

    Args:
        settings: of the search.
        runner: open, so that its space is known.
        taken_over: what an earlier search of a similar job contributed.

    """
    listed = runner.space.knobs
    auto = {"knobs_by_bound": True} if is_auto(settings.runner.options) else {}
    return {
        **auto,
        **(taken_over or {}),
        "strategy": asdict(settings.strategy),
        "seed": settings.seed,
        "knobs": [[k.name, str(k.kind), list(k.values), k.low, k.high, k.log] for k in listed],
        "pinned": dict(runner.pinned),
        "baseline": dict(runner.baseline),
        "objective": str(settings.objective.metric),
    }


def adopt(session: Session) -> str:
    """Bring strategy and session to where the journal ends; return a line for people.

    With the same definition the asks are repeated too, so the next proposal is the one that an
    undisturbed search would make. Of what came before a change of the definition, trials that
    still fit are told.
    """
    now = definition(session.settings, session.runner, session.taken_over.definition())
    events = session.journal.events
    opened = [e for e in events if e.name == "opened"]
    same = list(itertools.takewhile(lambda e: e.data.get("definition") == now, reversed(opened)))
    begin = same[-1].number - 1 if same else len(events)
    before = [e for e in opened if e.number <= begin]
    line = ""
    if before:
        line = _adopt_fitting(session, events[:begin], before)
    if same:
        _replay(session, events[begin:])
        line = f"going on with {len(session.trials)} finished trials"
    session.journal.append("opened", pid=os.getpid(), unix_s=time.time(), definition=now)
    if session.settings.resume == "failed" and opened:
        failed = [t for t in session.search_trials if t.status.has_failed]
        session.rerun = [(t.configuration, t.number) for t in failed]
        session.only_rerun = True
        line = f"running the {len(failed)} failed trials again"
    return line


@contextmanager
def _legible(session: Session, event: Event) -> Iterator[None]:
    """While an event is read.

    Raises:
        JournalError: it holds what this version does not know.

    """
    try:
        yield
    except JournalError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"{session.journal.path}: line {event.number + 1} ({event.name}) does not say what "
            f"this version understands ({type(error).__name__}: {error}). Use the version that "
            "wrote it, resume=never, or another run_dir."
        ) from error


def _finished(record: Mapping[str, Any]) -> Trial:
    """A trial as a journal tells of it.

    Raises:
        KeyError, ValueError: it is none.

    """
    trial = Trial.from_json(record)
    if trial.status is Status.OK and trial.measurement is None:
        raise ValueError("status=ok without a measurement")
    return trial


def _replay(session: Session, events: Sequence[Event]) -> None:
    strategy, pending = session.strategy, None
    started: dict[int, dict[str, Any]] = {}
    told = {t.number for t in session.trials}
    for event in events:
        data = event.data
        if event.name == "asked":
            with _legible(session, event):
                pending = dict(data["configuration"])
            proposal = strategy.ask()
            if proposal is None or key_of(proposal) != key_of(pending):
                session.view.warning("the strategy proposes otherwise than when this was recorded")
        elif event.name == "screened":
            with _legible(session, event):
                refused = screened_trial(dict(data["configuration"]), str(data["reason"]))
            strategy.tell(refused)
            session.screened += 1
            pending = None
        elif event.name == "started":
            with _legible(session, event):
                started[int(data["trial"])] = {**data, "configuration": dict(data["configuration"])}
                pending = None if Purpose(data["purpose"]) is Purpose.SEARCH else pending
        elif event.name == "finished":
            with _legible(session, event):
                trial = _finished(data["trial"])
            session.add(trial)
            told.discard(trial.number)
        elif event.name == "told":
            with _legible(session, event):
                trial = session.numbered(int(data["trial"]))
                session.search_seconds = float(data["search_seconds"])
            strategy.tell(trial)
            told.add(trial.number)
            pending = None if data.get("served") else pending
    for trial in list(session.trials):
        finished = trial.status is not Status.INTERRUPTED and trial.purpose is not Purpose.CONFIRM
        if finished and trial.number not in told:
            strategy.tell(trial)
            session.told(trial=trial.number)
    for number, data in started.items():
        ended = session.find(number)
        unfinished = ended is None or ended.status is Status.INTERRUPTED
        if unfinished and data["purpose"] == Purpose.SEARCH:
            session.rerun.append((dict(data["configuration"]), number))
    if pending is not None:
        session.rerun.append((pending, None))


def _adopt_fitting(session: Session, events: Sequence[Event], opened: Sequence[Event]) -> str:
    """Tell the trials of a search that was changed since, as far as they still fit."""
    runner = session.runner
    pinned_at: list[tuple[int, Mapping[str, Value]]] = []
    for event in opened:
        with _legible(session, event):
            pinned_at.append((event.number, dict(event.data["definition"]["pinned"])))
    latest: dict[int, tuple[Trial, Mapping[str, Value]]] = {}
    for event in events:
        with _legible(session, event):
            if event.name == "finished":
                trial = _finished(event.data["trial"])
                known = [p for number, p in pinned_at if number < event.number]
                latest[trial.number] = trial, known[-1]
            elif event.name == "started":
                session.numbers_from = max(session.numbers_from, int(event.data["trial"]) + 1)
            elif event.name == "told":
                session.search_seconds = float(event.data["search_seconds"])
    kept = total = 0
    for trial, pinned in latest.values():
        if trial.purpose not in (Purpose.BASELINE, Purpose.SEARCH):
            continue
        total += trial.purpose is Purpose.SEARCH
        fitted = _fit(runner.space, runner.pinned, {**pinned, **trial.configuration})
        if fitted is None or trial.status is Status.INTERRUPTED:
            continue
        if trial.purpose is Purpose.BASELINE and key_of(fitted) != key_of(runner.baseline):
            continue
        trial.configuration = fitted
        session.add(trial)
        session.strategy.tell(trial)
        kept += trial.purpose is Purpose.SEARCH
    return f"the search was changed: {kept} of {total} earlier trials still fit and are kept"


def _fit(
    space: Space, pinned: Mapping[str, Value], whole: Mapping[str, Value]
) -> dict[str, Value] | None:
    if any(name not in whole or not same_value(whole[name], v) for name, v in pinned.items()):
        return None
    if any(knob.name not in whole for knob in space.knobs) or not space.feasible(whole):
        return None
    return space.canonical(whole)


def _numbered(base: Path) -> list[Path]:
    """``base`` and its numbered successors that exist, in order."""
    found = [base] if base.exists() else []
    pattern = re.compile(re.escape(base.name) + r"-(\d+)$")
    if base.parent.exists():
        later = [(pattern.match(p.name), p) for p in base.parent.iterdir()]
        found += [p for _, p in sorted((int(m.group(1)), p) for m, p in later if m)]
    return found


def _since_opened(events: list[Event]) -> list[Event]:
    places = [i for i, event in enumerate(events) if event.name == "opened"]
    return events[places[-1] :] if places else events


__all__ = [
    "JournalError",
    "RefusedError",
    "adopt",
    "choose_run_dir",
    "definition",
    "open_journal",
]
