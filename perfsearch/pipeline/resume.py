"""Resume an earlier run of the same search: its directory, its journal and its trials."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import strategies
from perfsearch.core import command
from perfsearch.core.errors import BadInputError, NoStartError, nearest
from perfsearch.core.journal import JOURNAL, Event, Journal, legible, measured_as, read
from perfsearch.core.knob import Value, same_value
from perfsearch.core.locks import lock
from perfsearch.core.narrow import is_auto
from perfsearch.core.secrets import Redactor
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.explore import screened_trial
from perfsearch.pipeline.session import score_trial
from perfsearch.runners.base import Runner, StartsScripts
from perfsearch.tracking import names

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.pipeline.session import Session


class RefusedError(BadInputError):
    """A search that must not start as asked; the message names the key and the remedy."""


# -----------------------------------------------------------------------------
# The directory that a search works in: a new one, or that of an earlier run to resume.


def choose_run_dir(base: Path, resume: str, named: bool = False) -> tuple[Path, bool]:
    """The directory to work in, and whether it holds a search to go on with.

    ``base`` itself, or ``base-2``, ``base-3``, ... after finished searches. To run failed trials
    again it is the latest of them that has any; to extend a search, the latest. Either way it is
    ``base``, where the user ``named`` it and it does.

    Raises:
        RefusedError: a finished search is asked for, and there is none.

    """
    taken = [path for path in numbered(base) if (path / JOURNAL).exists()]
    if taken and resume == "failed":
        ordered = [*([base] if named and base in taken else []), *reversed(taken)]
        return next((path for path in ordered if _has_failed(path)), ordered[0]), True
    if taken and resume == "extend":
        return (base if named and base in taken else taken[-1]), True
    if resume in ("failed", "extend"):
        raise RefusedError(f"resume={resume}: there is no journal in {base}.")
    if taken and resume == "auto":
        _, events = read(taken[-1] / JOURNAL)
        if not any(e.name == "ended" for e in _since_opened(events)):
            return taken[-1], True
    if not taken:
        return base, False
    last = re.search(r"-(\d+)$", taken[-1].name.removeprefix(base.name))
    return base.with_name(f"{base.name}-{int(last.group(1)) + 1 if last else 2}"), False


def numbered(base: Path) -> list[Path]:
    """``base`` and its numbered successors that exist, in order."""
    found = [base] if base.exists() else []
    pattern = re.compile(re.escape(base.name) + r"-(\d+)$")
    if base.parent.exists():
        later = [(pattern.match(p.name), p) for p in base.parent.iterdir()]
        found += [p for _, p in sorted((int(m.group(1)), p) for m, p in later if m)]
    return found


def _has_failed(run_dir: Path) -> bool:
    """Whether a finished search has trials that failed."""
    path = run_dir / JOURNAL
    _, events = read(path)
    ended = any(e.name == "ended" for e in _since_opened(events))
    return ended and bool(failed_trials(path, events))


def failed_trials(path: Path, events: Sequence[Event]) -> list[int]:
    """Numbers of the trials that failed when they last ran.

    Raises:
        JournalError: an event of the journal ``path`` tells of no trial.

    """
    last: dict[int, Status] = {}
    for event in events:
        if event.name == "finished":
            with legible(path, event):
                trial = event.data["trial"]
                last[int(trial["number"])] = Status(trial["status"])
    return [number for number, status in last.items() if status.has_failed]


def _since_opened(events: list[Event]) -> list[Event]:
    places = [i for i, event in enumerate(events) if event.name == "opened"]
    return events[places[-1] :] if places else events


# -----------------------------------------------------------------------------
# Its journal, which this machine and job must be able to resume.


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
    before = measured_as(journal.header, journal.events)
    for name in sorted(before.keys() | identity.keys()) if before else ():
        if before.get(name) != identity.get(name) and name not in settings.resume_force:
            journal.close()
            raise RefusedError(
                f"{run_dir}: its trials were measured with {name}={before.get(name)}, and this is "
                f"{identity.get(name)}. {command.given().key('resume=never')} makes a new search, "
                f"{command.given().key(f'resume_force=[{name}]')} mixes them."
            )
    return journal


def require_start(runner: Runner, journal: Journal) -> None:
    """Refuse to go on with a search whose script ran before, and now does not even start.

    Without a start nothing is known of its knobs, and no trial would fit any more.

    Raises:
        RefusedError: so it is; the journal is as it was.
        NoStartError: the same, for a cause from outside of the script.

    """
    if not isinstance(runner, StartsScripts) or not (cause := runner.start_failure):
        return
    for event in journal.events:
        if event.name == "finished":
            with legible(journal.path, event):
                ran = event.data["trial"]["status"] == Status.OK
            if ran:
                told = f"{journal.path.parent}: the script ran when its trials were measured, and "
                told += f"does not now: {cause}"
                if runner.start_failed_from_outside:
                    raise NoStartError(told)
                raise RefusedError(
                    f"{told}. Mend that, and the same command goes on; or use resume=never for a "
                    "new search."
                )


def _why_not_again(journal: Journal) -> str:
    """Why failed trials cannot be run again now; empty where they can."""
    if not journal.ended:
        return "the search is not finished. The same command without resume=failed goes on."
    if not failed_trials(journal.path, journal.events):
        return "no trial of it failed, so there is nothing to run again."
    return ""


def search_definition(
    settings: Settings, runner: Runner, transferred: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What decides the sequence of proposals, as plain values for the journal.

    Args:
        settings: of the search.
        runner: open, so that its space is known.
        transferred: what a prior search of a similar job contributed.

    """
    listed = runner.space.knobs
    auto = {"knobs_by_bound": True} if is_auto(settings.runner.options) else {}
    ruled = {"constraints": [rule.text for rule in runner.rules]} if runner.rules else {}
    return {
        **auto,
        **ruled,
        **(transferred or {}),
        "strategy": asdict(settings.strategy),
        "seed": settings.seed,
        "knobs": [[k.name, str(k.kind), list(k.values), k.low, k.high, k.log] for k in listed],
        "pinned": dict(runner.pinned),
        "baseline": dict(runner.baseline),
        "objective": str(settings.objective.metric),
        "statistic": str(settings.objective.statistic),
    }


def strategy_parameters(settings: Settings) -> dict[str, Any]:
    """A search's strategy, and those of its options that are not the usual ones."""
    strategy = settings.strategy
    usual: dict[str, Any] = {}
    if strategy.options:  # a comparison of arms has none, and is no strategy either
        usual = {f.name: f.default for f in fields(strategies.load(strategy.name).Options)}
    chosen = {k: v for k, v in strategy.options.items() if k not in usual or v != usual[k]}
    return {
        "strategy": strategy.name,
        **{f"{names.OF_STRATEGY}{k}": v for k, v in Redactor().tree(chosen).items()},
    }


def parameters(settings: Settings, runner: Runner) -> dict[str, Any]:
    """What tells searches apart where several are compared, as plain values for the journal."""
    mode = {} if settings.mode == "search" else {"mode": settings.mode}
    return {
        **mode,
        "runner": settings.runner.name,
        **strategy_parameters(settings),
        "workload": settings.workload.name,
        "seed": settings.seed,
        "numerics": str(settings.numerics),
        "batch": settings.batch,
        **{f"identity/{k}": v for k, v in runner.identity().items()},
        **{f"pinned/{k}": v for k, v in runner.pinned.items()},
    }


# -----------------------------------------------------------------------------
# Its trials.


def restore(session: Session) -> str:
    """Bring strategy and session to where the journal ends; return a line for people.

    With the same definition the asks are repeated too, so the next proposal is the one that an
    undisturbed search would make. Of what came before a change of the definition, trials that
    still fit are told.
    """
    now = search_definition(session.settings, session.runner, session.transfer.definition())
    events = session.journal.events
    opened = [e for e in events if e.name == "opened"]
    same = list(itertools.takewhile(lambda e: e.data.get("definition") == now, reversed(opened)))
    begin = same[-1].number - 1 if same else len(events)
    before = [e for e in opened if e.number <= begin]
    line = ""
    if before:
        line = _restore_fitting(session, events[:begin], before)
    if same:
        _replay(session, events[begin:])
        done = [t for t in session.trials if t.status is not Status.INTERRUPTED]
        line = f"going on with {len(done)} finished trials"
    session.journal.append(
        "opened",
        pid=os.getpid(),
        unix_s=time.time(),
        definition=now,
        parameters=parameters(session.settings, session.runner),
        tracking=dict(session.tracker.destination),
    )
    if session.settings.resume == "failed" and opened:
        failed = [t for t in session.search_trials if t.status.has_failed]
        session.rerun = [(t.configuration, t.number) for t in failed]
        session.only_rerun = True
        line = f"running the {len(failed)} failed trials again"
    return line


def _replay(session: Session, events: Sequence[Event]) -> None:
    proposals, journal = session.proposals, session.journal.path
    pending: dict[str, dict[str, Value]] = {}  # proposed, and neither started nor answered
    started: dict[int, dict[str, Any]] = {}
    told = {t.number for t in session.trials}
    for event in events:
        data = event.data
        if event.name == "simulated":
            session.simulated += 1
        elif event.name == "asked":
            with legible(journal, event):
                asked = None if data["configuration"] is None else dict(data["configuration"])
            pending |= _ask_again(session, asked)
        elif event.name == "screened":
            with legible(journal, event):
                refused = screened_trial(dict(data["configuration"]), str(data["reason"]))
            proposals.tell(refused)
            session.screened += 1
            pending.pop(key_of(refused.configuration), None)
        elif event.name == "started":
            with legible(journal, event):
                started[int(data["trial"])] = {**data, "configuration": dict(data["configuration"])}
                of_search = Purpose(data["purpose"]) is Purpose.SEARCH
                pending.pop(key_of(data["configuration"]) if of_search else "", None)
        elif event.name == "finished":
            with legible(journal, event):
                trial = _finished(data["trial"])
            session.add(trial)
            told.discard(trial.number)
        elif event.name == "told":
            with legible(journal, event):
                trial = session.numbered(int(data["trial"]))
                session.search_seconds = float(data["search_seconds"])
            proposals.tell(trial)
            told.add(trial.number)
            pending.pop(key_of(trial.configuration) if data.get("served") else "", None)
    _tell_the_rest(session, told)
    for number, data in started.items():
        ended = session.find(number)
        unfinished = ended is None or ended.status is Status.INTERRUPTED
        if unfinished and data["purpose"] == Purpose.SEARCH:
            session.rerun.append((dict(data["configuration"]), number))
    session.rerun += [(configuration, None) for configuration in pending.values()]


def _ask_again(session: Session, asked: dict[str, Value] | None) -> dict[str, dict[str, Value]]:
    """What was proposed then, by its key; nothing where it was nothing."""
    proposal = session.proposals.ask_again(asked)
    keys = [None if point is None else key_of(point) for point in (proposal, asked)]
    if keys[0] != keys[1]:
        session.view.warning("the strategy proposes otherwise than when this was recorded")
    return {} if asked is None else {key_of(asked): asked}


def _tell_the_rest(session: Session, told: Container[int]) -> None:
    """Tell the strategy of trials that finished just before the search was killed."""
    for trial in list(session.trials):
        finished = trial.status is not Status.INTERRUPTED and trial.purpose.is_of_search
        if finished and trial.number not in told:
            session.proposals.tell(trial)
            session.told(trial=trial.number)


def _restore_fitting(session: Session, events: Sequence[Event], opened: Sequence[Event]) -> str:
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
        if trial.status in (Status.OK, Status.PRUNED):
            score_trial(trial, session.objective)  # what is scored may have changed
        session.add(trial)
        session.proposals.tell(trial)
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


def _finished(record: Mapping[str, Any]) -> Trial:
    """A trial as a journal tells of it.

    Raises:
        KeyError, ValueError: it is none.

    """
    trial = Trial.from_json(record)
    if trial.status is Status.OK and trial.measurement is None:
        raise ValueError("status=ok without a measurement")
    return trial


# -----------------------------------------------------------------------------
# Locks that keep two searches off the same devices and out of the same run directory.


class LockError(BadInputError):
    """A lock that cannot be had; the message names its holder."""


@contextmanager
def run_directory_lock(run_dir: Path, warn: Callable[[str], None] = print) -> Iterator[None]:
    """Hold ``run_dir`` for as long as the context lasts.

    Args:
        run_dir: the directory.
        warn: called with a line to show where its file system has no locks.

    Raises:
        LockError: another process works in it.

    """

    def refuse(holder: str) -> None:
        raise LockError(
            f"run_dir={run_dir}: process {holder} is running this search, or uploading it to "
            "MLflow. Wait for it, or set run_dir to another directory."
        )

    with _locked(run_dir / ".lock", refuse) as locked:
        if not locked:
            warn(
                f"{run_dir}: its file system has no locks, so that nothing keeps a second search "
                "out of this directory. Set run_dir to a directory of another file system, or see "
                "to it that none is started in it"
            )
        yield


LOCKS_VARIABLE = "PERFSEARCH_LOCK_DIRECTORY"
"""Environment variable for ``limits.lock_directory`` where that is not set."""

LOCKS = Path("/tmp/perfsearch-locks")
"""Where searches of all users of a host lock its devices, whatever ``TMPDIR`` each of them has."""


@contextmanager
def device_lock(
    device_set: str, on_wait: Callable[[str], None], directory: Path | None = None
) -> Iterator[None]:
    """Hold every device of ``device_set`` (names apart by commas), waiting for its turn.

    Args:
        device_set: empty for nothing to hold.
        on_wait: called once for each device with a line to show, before waiting for it.
        directory: ``limits.lock_directory``.

    Raises:
        LockError: there is no place for the locks.

    """
    devices = sorted({name for name in device_set.split(",") if name})
    if not devices:
        yield
        return
    # Sorted order, so that two searches over overlapping sets cannot wait for each other.
    first, rest = devices[0], ",".join(devices[1:])
    file = _lock_file(first, directory)

    def wait(pid: str) -> None:
        on_wait(f"waiting for {first}: the search of process {pid} is using it")

    with _locked(file, wait) as locked:
        if not locked:
            raise LockError(f"{file.parent}: its file system has no locks. {_OTHER_PLACE}")
        with device_lock(rest, on_wait, directory):
            yield


_OTHER_PLACE = (
    "Searches on the same devices must wait for each other: set limits.lock_directory to a "
    "directory of this host that all of them can write"
)


def _lock_file(device: str, asked: Path | None) -> Path:
    directory = asked or Path(os.environ.get(LOCKS_VARIABLE) or LOCKS)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        made = directory.lstat()
        if stat.S_ISLNK(made.st_mode) and made.st_uid not in (os.getuid(), 0):
            raise LockError(f"{directory} is a link of another user's. {_OTHER_PLACE}")
        if directory == LOCKS and made.st_uid == os.getuid():
            directory.chmod(0o1777)  # every user's, and nobody takes another's files away
    except OSError as error:
        raise LockError(f"{directory} cannot be made: {error.strerror}. {_OTHER_PLACE}") from error
    return directory / f"{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"


def _open_lock(path: Path) -> int:
    """Open a lock's file, which is made where there is none.

    Another user's is not opened as one that could be made: in a directory of all users that is
    refused (``fs.protected_regular``).
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # made in between
        return os.open(path, flags)
    if path.parent == LOCKS:
        os.fchmod(descriptor, 0o666)
    return descriptor


@contextmanager
def _locked(path: Path, wait: Callable[[str], None]) -> Iterator[bool]:
    """Hold ``path``; ``wait`` is told the holder's pid before it is waited for.

    Yields whether it is held: ``False`` where the file system has no locks.
    """
    try:
        descriptor = _open_lock(path)
    except OSError as error:
        raise LockError(f"{path}: cannot be opened: {error.strerror}.") from error
    try:
        try:
            locked = lock(descriptor, wait=False)
        except BlockingIOError:
            wait(os.pread(descriptor, 32, 0).decode().strip() or "another")
            locked = lock(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise LockError(f"{path}: cannot be written: {error.strerror}.") from error
        yield locked
    finally:
        os.close(descriptor)
