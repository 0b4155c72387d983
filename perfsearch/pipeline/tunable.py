"""What can be tuned in a job, as far as that is known without starting anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import knobs
from perfsearch.config.schema import Settings, default_run_dir
from perfsearch.core import command
from perfsearch.core.journal import JOURNAL, JournalError, legible, measured_as, read
from perfsearch.core.knob import Knob, Value
from perfsearch.core.narrow import SEARCH
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.metrics.bounds import UpperBound, headroom_of, upper_bounds
from perfsearch.pipeline.search import build_runner, settled

if TYPE_CHECKING:
    from perfsearch.runners.base import Runner

SCHEMA = 1
"""Version of the plain form, under ``schema``."""


class State(StrEnum):
    """What a search does with a knob."""

    SEARCHED = "searched"
    FIXED = "fixed"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Tunable:
    """A knob in this job.

    Attributes:
        name: of the knob.
        state: what a search does with it.
        today: its value in the job as it is; what it is fixed to; ``None`` where it is left out.
        knob: its declaration; ``None``: only its name is known, as of an argument of a script.
        why: it is not searched, and what to do about it.
        place: 1 for the searched knob of which most is expected, 2 for the next; ``None``: unknown.
        bound: the most that it can gain alone, relative; infinite where nothing bounds it;
            ``None``: no profile of the job is known.

    """

    name: str
    state: State
    today: Value = None
    knob: Knob | None = None
    why: str = ""
    place: int | None = None
    bound: float | None = None

    def to_plain(self) -> dict[str, Any]:
        """Plain values for programs; a bound that is none is ``null``."""
        bounded = self.bound is not None and math.isfinite(self.bound)
        return {
            **({} if self.knob is None else self.knob.to_plain()),
            "name": self.name,
            "state": str(self.state),
            "today": self.today,
            "why": self.why,
            "expected_place": self.place,
            "gain_at_most": self.bound if bounded else None,
        }


@dataclass(frozen=True)
class Tunables:
    """What can be tuned in a job.

    Attributes:
        job: model or script, ranks, devices, versions.
        knobs: searched ones first, those of which most is expected before the others.
        bounds: of each part of a step, where a search has profiled this very job before.
        profile: that search's directory.
        unseen: what is only known once the job was started; empty: nothing.
        rules: of the user's own, which every configuration keeps.

    """

    job: Mapping[str, str]
    knobs: Sequence[Tunable]
    bounds: Sequence[UpperBound] = ()
    profile: Path | None = None
    unseen: str = ""
    rules: Sequence[str] = ()

    def to_plain(self) -> dict[str, Any]:
        """Plain values for programs."""
        return {
            "schema": SCHEMA,
            "job": dict(self.job),
            "knobs": [knob.to_plain() for knob in self.knobs],
            "bounds": [
                {
                    "part": str(bound.part),
                    "gain_at_most": bound.gain if math.isfinite(bound.gain) else None,
                    "evidence": bound.evidence,
                }
                for bound in self.bounds
            ],
            "profile": None if self.profile is None else str(self.profile),
            "unseen": self.unseen,
            "constraints": list(self.rules),
        }


def tunables(settings: Settings) -> Tunables:
    """What a search with these settings would search, fix and leave out; nothing is started.

    Raises:
        BadInputError: as a search with these settings.

    """
    settings = settled(settings)
    runner = build_runner(settings)
    try:
        profile, bounds = _profiled(settings, runner)
        return Tunables(
            runner.identity() if runner.space.knobs or not runner.unseen else {},
            [*_searched(runner, bounds), *_fixed(runner), *_left_out(runner)],
            bounds,
            profile,
            runner.unseen,
            [rule.text for rule in runner.rules],
        )
    finally:
        runner.close()


def _searched(runner: Runner, bounds: Sequence[UpperBound]) -> list[Tunable]:
    if not runner.space.knobs:
        return []
    order = runner.hints([]).effect_order
    places = {name: place for place, name in enumerate(order, start=1)}
    found = [
        Tunable(
            knob.name,
            State.SEARCHED,
            runner.baseline[knob.name],
            knob,
            place=places.get(knob.name),
            bound=headroom_of(bounds, [knob]),
        )
        for knob in runner.space.knobs
    ]
    return sorted(found, key=lambda one: one.place or len(found) + 1)


def _fixed(runner: Runner) -> Iterator[Tunable]:
    allowed = runner.environment.numerics
    for name, value in runner.pinned.items():
        knob = runner.declared.get(name)
        cannot = "" if knob is None else _never_matters(knob, runner.pinned)
        if cannot:
            yield Tunable(name, State.FIXED, value, knob, cannot)
            continue
        keys = [f"runner.knobs.{name}={SEARCH}"]
        if knob is not None and knob.numerics.rank > allowed.rank:
            keys.append(f"numerics={knob.numerics}")
        words = " ".join(map(command.given().key, keys))
        yield Tunable(name, State.FIXED, value, knob, f"{words} searches it")


def _never_matters(knob: Knob, pinned: Mapping[str, Value]) -> str:
    """Why it has no effect whatever it is set to; empty where it may have one."""
    for other, values in knob.when.items():
        if other in pinned and pinned[other] not in values:
            return f"without effect, as {other} is fixed"
    return ""


def _left_out(runner: Runner) -> Iterator[Tunable]:
    for name, why in runner.not_searched().items():
        if name not in runner.space.by_name and name not in runner.pinned:
            record = knobs.by_name.get(name)
            known = None if record is None else record.knob
            yield Tunable(name, State.LEFT_OUT, knob=runner.declared.get(name, known), why=why)


# -----------------------------------------------------------------------------
# What an earlier search of the same job has seen of its steps.


def _profiled(settings: Settings, runner: Runner) -> tuple[Path | None, list[UpperBound]]:
    """The latest search beside this one's directory that has profiled this job, and the bounds."""
    beside = (settings.run_dir or default_run_dir(settings)).absolute().parent
    job = runner.identity() if runner.space.knobs else {}
    found = sorted(beside.glob(f"*/{JOURNAL}"), key=lambda path: -path.stat().st_mtime)
    for journal in found if job else ():
        try:
            bounds = _bounds_in(journal, job)
        except JournalError:
            continue  # of another version, or none at all: it is nobody's fault here
        if bounds:
            return journal.parent, bounds
    return None, []


def _bounds_in(path: Path, job: Mapping[str, str]) -> list[UpperBound]:
    """From the baseline of a search of this very job; empty where it is none, or has no profile.

    Raises:
        JournalError: the journal cannot be read.

    """
    header, events = read(path)
    before = measured_as(header, events)
    if any(before.get(name) != value for name, value in job.items()):
        return []
    for event in events:
        with legible(path, event):
            if event.name != "finished":
                continue
            trial = Trial.from_json(event.data["trial"])
            is_baseline = trial.purpose is Purpose.BASELINE and trial.status is Status.OK
            if is_baseline and trial.measurement is not None:
                return upper_bounds(trial.measurement)
    return []
