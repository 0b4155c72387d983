"""Costs that an earlier search measured, in the knobs of this one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.core.hints import Earlier
from perfsearch.core.journal import JOURNAL, legible, read
from perfsearch.core.knob import Configuration, Value, same_value
from perfsearch.core.objective import Metric, Objective
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.runners.base import Runner

if TYPE_CHECKING:
    from perfsearch.tracking.earlier import EarlierSearches, StoredSearch

FEWEST = 3
"""Configurations that an earlier search must have measured to be of use."""

MOST = 100
"""Configurations that are taken over: half of them the best, the others spread over the rest."""


@dataclass
class EarlierCosts:
    """Costs of an earlier search's trials by configuration.

    Attributes:
        runner: of this search, open.
        searched: names of the knobs that the earlier search varied.

    """

    runner: Runner
    searched: set[str] = field(default_factory=set)
    _costs: dict[str, list[float]] = field(default_factory=dict)
    _points: dict[str, dict[str, Value]] = field(default_factory=dict)
    _baseline: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        """Number of configurations."""
        return len(self._points)

    def add(self, whole: Configuration, cost: float, purpose: Purpose) -> None:
        """Note a trial, if its configuration is one of this search's knobs.

        Constraints may differ between two jobs, so that the configuration may be infeasible here.
        """
        space, pinned = self.runner.space, self.runner.pinned
        if any(n in whole and not same_value(whole[n], v) for n, v in pinned.items()):
            return
        if any(k.name not in whole or not k.contains(whole[k.name]) for k in space.knobs):
            return
        point = space.canonical(whole)
        key = key_of(point)
        self._points[key] = point
        self._costs.setdefault(key, []).append(cost)
        if purpose in (Purpose.BASELINE, Purpose.SENTINEL):
            self._baseline.append(cost)

    def unknown(self) -> list[str]:
        """Knobs that were searched there and are neither searched nor held here."""
        return sorted(self.searched - self.runner.space.by_name.keys() - set(self.runner.pinned))

    def earlier(self, source: str) -> Earlier | None:
        """Costs over the baseline's, or over the median where no baseline was measured.

        ``None`` where they are too few or of other knobs.
        """
        if len(self) < FEWEST or self.unknown():
            return None
        medians = {key: statistics.median(costs) for key, costs in self._costs.items()}
        reference = statistics.median(self._baseline or medians.values())
        logs = {key: round(math.log(cost / reference), 6) for key, cost in medians.items()}
        ranked = sorted(self._points, key=lambda key: (logs[key], key))
        if len(ranked) > MOST:
            best, rest = ranked[: MOST // 2], ranked[MOST // 2 :]
            kept = MOST - len(best)
            ranked = best + [rest[i * len(rest) // kept] for i in range(kept)]
        return Earlier(source, tuple((self._points[key], logs[key]) for key in ranked))


def in_directory(path: Path, metric: Metric, runner: Runner) -> EarlierCosts:
    """What the journal of a run directory holds.

    Raises:
        JournalError: there is none, or it cannot be read.
        ValueError: a trial was not measured by ``metric``.

    """
    objective, costs = Objective(metric), EarlierCosts(runner)
    pinned: dict[str, Value] = {}
    latest: dict[int, tuple[Trial, dict[str, Value]]] = {}
    journal = path / JOURNAL
    for event in read(journal)[1]:
        with legible(journal, event):
            if event.name == "opened":
                pinned = dict(event.data["definition"]["pinned"])
            elif event.name == "finished":
                trial = Trial.from_json(event.data["trial"])
                latest[trial.number] = trial, pinned
                costs.searched |= trial.configuration.keys()
    for trial, held in latest.values():
        if trial.status is Status.OK and trial.measurement is not None:
            cost = objective.cost(trial.measurement)
            costs.add({**held, **trial.configuration}, cost, trial.purpose)
    return costs


def in_store(
    store: EarlierSearches, search: StoredSearch, metric: Metric, runner: Runner
) -> EarlierCosts:
    """What the trials' runs of a stored search hold.

    Raises:
        StoreError: the store does not answer.

    """
    from perfsearch.tracking.earlier import value_of
    from perfsearch.tracking.names import clean_key, plain

    costs = EarlierCosts(runner)
    knobs = {clean_key(name): knob for name, knob in runner.space.by_name.items()}
    held = {clean_key(name): plain(value) for name, value in runner.pinned.items()}
    for trial in store.trials(search, metric):
        costs.searched |= {_name_of(key, runner) for key in trial.configuration}
        texts = {**search.pinned, **trial.configuration}
        if any(texts.get(name, text) != text for name, text in held.items()):
            continue
        try:
            whole = {knob.name: value_of(knob, texts[name]) for name, knob in knobs.items()}
        except LookupError:
            continue  # a value that is none of this search's
        costs.add(whole, trial.cost, trial.purpose)
    return costs


def _name_of(key: str, runner: Runner) -> str:
    """The knob that a param's key stands for, or the key itself."""
    from perfsearch.tracking.names import clean_key

    known: Iterable[str] = (*runner.space.by_name, *runner.pinned)
    return next((name for name in known if clean_key(name) == key), key)
