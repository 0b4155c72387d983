"""What is transferred from a prior search of a similar job, and how the journal keeps it.

It is a belief of the strategy (``Hints.prior_search``), never a trial: it is in no record, spends
no budget and cannot be handed over. A resumed search takes it from its own journal.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.config.options import ConfigError
from perfsearch.core.hints import PriorSearch
from perfsearch.core.journal import JOURNAL, JournalError, legible, read
from perfsearch.core.knob import Configuration, Value, same_value
from perfsearch.core.objective import Metric, Objective
from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.runners.base import Runner

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.tracking.history import PriorSearches, StoredSearch

KEY = "strategy.warm_start"
AUTO = "auto"

FEWEST = 3
"""Configurations that a prior search must have measured to be of use."""

MOST = 100
"""Configurations that are transferred: half of them the best, the others spread over the rest."""

_MOST_READ = 20
"""Searches of the store whose trials are read, the most similar first."""

_JOURNAL_KEY = "earlier"
"""Of the search's definition, under which the journal keeps what was transferred."""

_RUN_ID = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True)
class Transfer:
    """What a search starts from.

    Attributes:
        line: for people; empty where nothing was asked for.
        prior_search: what was found; ``None`` where there is nothing.
        warning: why nothing is transferred though it was asked for; empty otherwise.

    """

    line: str = ""
    prior_search: PriorSearch | None = None
    warning: str = ""

    def definition(self) -> dict[str, Any]:
        """Plain values for the journal; empty where there is nothing."""
        if self.prior_search is None:
            return {}
        costs = [[dict(configuration), log] for configuration, log in self.prior_search.costs]
        return {_JOURNAL_KEY: {"source": self.prior_search.source, "costs": costs}}


def find(
    settings: Settings, runner: Runner, defined: Mapping[str, Any], journal: Path | None
) -> Transfer:
    """Find what ``strategy.warm_start`` asks for, or what an earlier part of this search found.

    Args:
        settings: of the search.
        runner: open, so that its space is known.
        defined: the definition of the search, as for the journal, without what is transferred.
        journal: of the search that is resumed; ``None`` for a new one.

    Raises:
        ConfigError: what it names is not there, or has nothing that fits.
        JournalError: the journal cannot be read.

    """
    asked = settings.strategy.options.get("warm_start")
    if asked is None or settings.mode != "search" or not runner.space.knobs:
        return Transfer()
    search_id = ""
    if journal is not None:
        header, events = read(journal)
        search_id = str(header.get("search_id", ""))
        opened = [e for e in events if e.name == "opened"]
        last: Mapping[str, Any] = opened[-1].data.get("definition", {}) if opened else {}
        if opened and {k: v for k, v in last.items() if k != _JOURNAL_KEY} == dict(defined):
            return _from_journal(last.get(_JOURNAL_KEY), journal)
    if asked == AUTO:
        return _most_similar(settings, runner, search_id)
    path = Path(str(asked))
    if path.is_dir():
        return _of_directory(path, settings, runner)
    if _RUN_ID.match(str(asked)):
        return _of_run(str(asked), settings, runner)
    raise ConfigError(
        KEY,
        f"{KEY}={asked}: there is no such directory, and an MLflow run's id has 32 hexadecimal "
        "digits. Allowed: null, auto, the run directory of a prior search, the id of its run.",
    )


def _from_journal(kept: Any, journal: Path) -> Transfer:
    if kept is None:
        return Transfer(f"{KEY}: nothing, as when this search began")
    try:
        costs = tuple((dict(configuration), float(log)) for configuration, log in kept["costs"])
        return _transferred(PriorSearch(str(kept["source"]), costs))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"{journal}: what it says of {KEY} is not what this version understands "
            f"({type(error).__name__}: {error}). Use the version that wrote it, resume=never, or "
            "another run_dir."
        ) from error


def _of_directory(path: Path, settings: Settings, runner: Runner) -> Transfer:
    """The journal of a run directory.

    Raises:
        ConfigError: it has none, or nothing in it fits.

    """
    try:
        costs = in_directory(path, settings.objective.metric, runner)
    except (JournalError, ValueError) as error:
        raise ConfigError(KEY, f"{KEY}={path}: {error}") from error
    return _required(costs, str(path), str(path))


def _of_run(run_id: str, settings: Settings, runner: Runner) -> Transfer:
    """A search's run in the store.

    Raises:
        ConfigError: the store does not answer, has no such search, or nothing in it fits.

    """
    from perfsearch.tracking.history import PriorSearchError, StoreError

    _require_tracking(settings, run_id)
    try:
        store = _open_store(settings)
        search = store.by_id(run_id)
        costs = in_store(store, search, settings.objective.metric, runner)
    except PriorSearchError as error:
        raise ConfigError(KEY, f"{KEY}={run_id}: {error}.") from error
    except StoreError as error:
        raise ConfigError(KEY, f"{KEY}={run_id}: {error}. See tracking.uri.") from error
    return _required(costs, run_id, _name(search))


def _most_similar(settings: Settings, runner: Runner, own_id: str) -> Transfer:
    """The search with these knobs whose job is most like this one, the latest of equals.

    A store that fails costs a warning: the search goes on without it.
    """
    from perfsearch.tracking.history import StoreError

    _require_tracking(settings, AUTO)
    try:
        store = _open_store(settings)
        found = store.of_runner(settings.tracking.experiment, settings.runner.name)
        others = [s for s in found if s.search_id != own_id]
        others.sort(key=lambda s: -_alike(s.parameters, settings, runner))
        for search in others[:_MOST_READ]:
            costs = in_store(store, search, settings.objective.metric, runner)
            prior_search = costs.prior_search(_name(search))
            if prior_search is not None:
                return _transferred(prior_search)
    except StoreError as error:
        return Transfer(warning=f"{KEY}={AUTO}: {error}; nothing is transferred")
    return Transfer(
        f"{KEY}={AUTO}: no prior search of runner={settings.runner.name} with these knobs is in "
        f"the experiment {settings.tracking.experiment}; nothing is transferred"
    )


def _alike(parameters: Mapping[str, str], settings: Settings, runner: Runner) -> int:
    """In how many facts two jobs agree: the workload, and what the runner's trials hold for."""
    own = {f"identity/{name}": value for name, value in runner.identity().items()}
    own["workload"] = settings.workload.name
    return sum(parameters.get(name) == value for name, value in own.items())


def _required(costs: PriorCosts, name: str, source: str) -> Transfer:
    unknown, own = costs.unknown(), ", ".join(costs.runner.space.by_name)
    if unknown:
        raise ConfigError(
            KEY,
            f"{KEY}={name}: it searched {', '.join(unknown)}, which this search does not know. "
            f"Its knobs are {own}. Name a search of the same runner.",
        )
    prior_search = costs.prior_search(source)
    if prior_search is None:
        raise ConfigError(
            KEY,
            f"{KEY}={name}: {len(costs)} configurations measured there are ones of this search's "
            f"knobs ({own}); at least {FEWEST} are needed. Name another search, or leave {KEY} "
            "out.",
        )
    return _transferred(prior_search)


def _transferred(prior: PriorSearch) -> Transfer:
    best = 100.0 * (1.0 - math.exp(prior.costs[0][1]))
    return Transfer(
        f"{KEY}: {len(prior.costs)} configurations of {prior.source} are believed until this "
        f"job's own trials disagree (the best saved {best:.1f}% there); none counts as a trial",
        prior,
    )


def _require_tracking(settings: Settings, asked: str) -> None:
    if not settings.tracking.enabled:
        raise ConfigError(
            KEY,
            f"{KEY}={asked}: prior searches are looked up in the tracking store, and "
            "tracking.enabled=false. Name a run directory instead, or enable tracking.",
        )


def _open_store(settings: Settings) -> PriorSearches:
    from perfsearch.tracking.history import PriorSearches
    from perfsearch.tracking.location import locate

    return PriorSearches(locate(settings.tracking.uri))


def _name(search: StoredSearch) -> str:
    return f"{search.name} (MLflow run {search.run_id})"


# -----------------------------------------------------------------------------
# Costs that a prior search measured, in the knobs of this one.


@dataclass
class PriorCosts:
    """Costs of a prior search's trials by configuration.

    Attributes:
        runner: of this search, open.
        searched: names of the knobs that the prior search varied.

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
        if purpose is Purpose.BESIDE:
            return
        space, pinned = self.runner.space, self.runner.pinned
        if any(n in whole and not same_value(whole[n], v) for n, v in pinned.items()):
            return
        if any(k.name not in whole or not k.contains(whole[k.name]) for k in space.knobs):
            return
        point = space.canonical({k.name: k.own(whole[k.name]) for k in space.knobs})
        key = key_of(point)
        self._points[key] = point
        self._costs.setdefault(key, []).append(cost)
        if purpose in (Purpose.BASELINE, Purpose.SENTINEL):
            self._baseline.append(cost)

    def unknown(self) -> list[str]:
        """Knobs that were searched there and are neither searched nor held here."""
        return sorted(self.searched - self.runner.space.by_name.keys() - set(self.runner.pinned))

    def prior_search(self, source: str) -> PriorSearch | None:
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
        return PriorSearch(source, tuple((self._points[key], logs[key]) for key in ranked))


def in_directory(path: Path, metric: Metric, runner: Runner) -> PriorCosts:
    """What the journal of a run directory holds.

    Raises:
        JournalError: there is none, or it cannot be read.
        ValueError: a trial was not measured by ``metric``.

    """
    objective, costs = Objective(metric), PriorCosts(runner)
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
    store: PriorSearches, search: StoredSearch, metric: Metric, runner: Runner
) -> PriorCosts:
    """What the trials' runs of a stored search hold.

    Raises:
        StoreError: the store does not answer.

    """
    from perfsearch.tracking.history import stands_for, value_of
    from perfsearch.tracking.names import clean_key

    costs = PriorCosts(runner)
    knobs = {clean_key(name): knob for name, knob in runner.space.by_name.items()}
    held = {clean_key(name): value for name, value in runner.pinned.items()}
    for trial in store.trials(search, metric):
        costs.searched |= {_name_of(key, runner) for key in trial.configuration}
        texts = {**search.pinned, **trial.configuration}
        if any(n in texts and not stands_for(texts[n], value) for n, value in held.items()):
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
