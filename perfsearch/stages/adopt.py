"""What an earlier run of the same search finished, taken over by strategy and session."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfsearch.core.journal import Event, legible
from perfsearch.core.knob import Value, same_value
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.stages.opening import definition
from perfsearch.stages.search import screened_trial

if TYPE_CHECKING:
    from perfsearch.stages.session import Session


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
    strategy, journal, pending = session.strategy, session.journal.path, None
    started: dict[int, dict[str, Any]] = {}
    told = {t.number for t in session.trials}
    for event in events:
        data = event.data
        if event.name == "asked":
            with legible(journal, event):
                pending = dict(data["configuration"])
            proposal = strategy.ask()
            if proposal is None or key_of(proposal) != key_of(pending):
                session.view.warning("the strategy proposes otherwise than when this was recorded")
        elif event.name == "screened":
            with legible(journal, event):
                refused = screened_trial(dict(data["configuration"]), str(data["reason"]))
            strategy.tell(refused)
            session.screened += 1
            pending = None
        elif event.name == "started":
            with legible(journal, event):
                started[int(data["trial"])] = {**data, "configuration": dict(data["configuration"])}
                pending = None if Purpose(data["purpose"]) is Purpose.SEARCH else pending
        elif event.name == "finished":
            with legible(journal, event):
                trial = _finished(data["trial"])
            session.add(trial)
            told.discard(trial.number)
        elif event.name == "told":
            with legible(journal, event):
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
    runner, journal = session.runner, session.journal.path
    pinned_at: list[tuple[int, Mapping[str, Value]]] = []
    for event in opened:
        with legible(journal, event):
            pinned_at.append((event.number, dict(event.data["definition"]["pinned"])))
    latest: dict[int, tuple[Trial, Mapping[str, Value]]] = {}
    for event in events:
        with legible(journal, event):
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
