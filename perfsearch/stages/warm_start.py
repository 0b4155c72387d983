"""What is taken over from an earlier search of a similar job, and how the journal keeps it.

It is a belief of the strategy (``Hints.earlier``), never a trial: it is in no record, spends no
budget and cannot be handed over. A resumed search takes it from its own journal.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.config_options import ConfigError
from perfsearch.runners.base import Runner
from perfsearch.search.hints import Earlier
from perfsearch.search.journal import Event, JournalError, read
from perfsearch.search.knob import Configuration, Value, same_value
from perfsearch.search.objective import Objective
from perfsearch.search.space import key_of
from perfsearch.search.trial import Purpose, Status, Trial

if TYPE_CHECKING:
    from perfsearch.config import Settings
    from perfsearch.tracking.earlier import EarlierSearches, StoredSearch

KEY = "strategy.warm_start"
AUTO = "auto"

FEWEST = 3
"""Configurations that an earlier search must have measured to be of use."""

MOST = 100
"""Configurations that are taken over: half of them the best, the others spread over the rest."""

_LOOKED_AT = 20
"""Searches of the store whose trials are looked at, the most similar first."""

_RUN_ID = re.compile(r"^[0-9a-f]{32}$")
_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class TakenOver:
    """What a search starts from.

    Attributes:
        line: for people; empty where nothing was asked for.
        earlier: what was found; ``None`` where there is nothing.
        warning: why nothing is taken over though it was asked for; empty otherwise.

    """

    line: str = ""
    earlier: Earlier | None = None
    warning: str = ""

    def definition(self) -> dict[str, Any]:
        """Plain values for the journal; empty where there is nothing."""
        if self.earlier is None:
            return {}
        costs = [[dict(configuration), log] for configuration, log in self.earlier.costs]
        return {"earlier": {"source": self.earlier.source, "costs": costs}}


@dataclass
class _Seen:
    """Costs of an earlier search's trials by configuration, in this search's knobs."""

    runner: Runner
    costs: dict[str, list[float]] = field(default_factory=dict)
    points: dict[str, dict[str, Value]] = field(default_factory=dict)
    baseline: list[float] = field(default_factory=list)

    def add(self, whole: Configuration, cost: float, purpose: Purpose) -> None:
        """Note a trial, if its configuration is one of this search's knobs."""
        space, pinned = self.runner.space, self.runner.pinned
        if any(n in whole and not same_value(whole[n], v) for n, v in pinned.items()):
            return
        if any(k.name not in whole or not k.contains(whole[k.name]) for k in space.knobs):
            return
        point = space.canonical(whole)
        key = key_of(point)
        self.points[key] = point
        self.costs.setdefault(key, []).append(cost)
        if purpose in (Purpose.BASELINE, Purpose.SENTINEL):
            self.baseline.append(cost)

    def earlier(self, source: str) -> Earlier | None:
        """Costs over the baseline's, or over the median where no baseline was measured."""
        if len(self.points) < FEWEST:
            return None
        medians = {key: statistics.median(costs) for key, costs in self.costs.items()}
        reference = statistics.median(self.baseline or medians.values())
        logs = {key: round(math.log(cost / reference), 6) for key, cost in medians.items()}
        ranked = sorted(self.points, key=lambda key: (logs[key], key))
        if len(ranked) > MOST:
            best, rest = ranked[: MOST // 2], ranked[MOST // 2 :]
            kept = MOST - len(best)
            ranked = best + [rest[i * len(rest) // kept] for i in range(kept)]
        return Earlier(source, tuple((self.points[key], logs[key]) for key in ranked))


def take_over(
    settings: Settings, runner: Runner, defined: Mapping[str, Any], journal: Path | None
) -> TakenOver:
    """Find what ``strategy.warm_start`` asks for, or what an earlier part of this search found.

    Args:
        settings: of the search.
        runner: open, so that its space is known.
        defined: the definition of the search, as for the journal, without what is taken over.
        journal: of the search that is resumed; ``None`` for a new one.

    Raises:
        ConfigError: what it names is not there, or has nothing that fits.
        JournalError: the journal cannot be read.

    """
    asked = settings.strategy.options.get("warm_start")
    if asked is None or settings.mode != "search" or not runner.space.knobs:
        return TakenOver()
    search_id = ""
    if journal is not None:
        header, events = read(journal)
        search_id = str(header.get("search_id", ""))
        opened = [e for e in events if e.name == "opened"]
        last: Mapping[str, Any] = opened[-1].data.get("definition", {}) if opened else {}
        if opened and {k: v for k, v in last.items() if k != "earlier"} == dict(defined):
            return _as_before(last.get("earlier"))
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
        "digits. Allowed: null, auto, the run directory of an earlier search, the id of its run.",
    )


def _as_before(kept: Mapping[str, Any] | None) -> TakenOver:
    if kept is None:
        return TakenOver(f"{KEY}: nothing, as when this search began")
    costs = tuple((dict(configuration), float(log)) for configuration, log in kept["costs"])
    return _taken(Earlier(str(kept["source"]), costs))


def _taken(earlier: Earlier) -> TakenOver:
    best = 100.0 * (1.0 - math.exp(earlier.costs[0][1]))
    return TakenOver(
        f"{KEY}: {len(earlier.costs)} configurations of {earlier.source} are believed until this "
        f"job's own trials disagree (the best saved {best:.1f}% there); none counts as a trial",
        earlier,
    )


def _of_directory(path: Path, settings: Settings, runner: Runner) -> TakenOver:
    """The journal of a run directory.

    Raises:
        ConfigError: it has none, or nothing in it fits.

    """
    try:
        _, events = read(path / _JOURNAL)
    except JournalError as error:
        raise ConfigError(KEY, f"{KEY}={path}: {error}") from error
    objective = Objective(settings.objective.metric)
    seen, pinned, searched = _Seen(runner), {}, set[str]()
    latest: dict[int, tuple[Trial, dict[str, Value]]] = {}
    for event in events:
        if event.name == "opened":
            definition = event.data.get("definition", {})
            pinned = dict(definition.get("pinned", {}))
        elif event.name == "finished":
            trial = _trial_of(event, path)
            latest[trial.number] = trial, pinned
            searched |= trial.configuration.keys()
    _require_known(str(path), searched, runner)
    for trial, held in latest.values():
        if trial.status is not Status.OK or trial.measurement is None:
            continue
        try:
            cost = objective.cost(trial.measurement)
        except ValueError as error:
            raise ConfigError(KEY, f"{KEY}={path}: trial {trial.number}: {error}.") from error
        seen.add({**held, **trial.configuration}, cost, trial.purpose)
    return _required(seen, str(path), str(path))


def _trial_of(event: Event, path: Path) -> Trial:
    try:
        return Trial.from_json(event.data["trial"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            KEY,
            f"{KEY}={path}: event {event.number} does not tell of a trial as this version does "
            f"({type(error).__name__}: {error}). Name a search of this version.",
        ) from error


def _of_run(run_id: str, settings: Settings, runner: Runner) -> TakenOver:
    """A search's run in the store.

    Raises:
        ConfigError: the store does not answer, has no such search, or nothing in it fits.

    """
    from perfsearch.tracking.earlier import EarlierSearchError

    _require_tracking(settings, run_id)
    try:
        store = _open_store(settings)
        search = store.by_id(run_id)
    except EarlierSearchError as error:
        raise ConfigError(KEY, f"{KEY}={run_id}: {error}.") from error
    except Exception as error:  # MLflow raises whatever its database or the network does
        raise ConfigError(
            KEY, f"{KEY}={run_id}: the store cannot be read ({_short(error)}). See tracking.uri."
        ) from error
    seen, searched = _seen_in_store(store, search, settings, runner)
    _require_known(run_id, searched, runner)
    return _required(seen, run_id, _name(search))


def _most_similar(settings: Settings, runner: Runner, own_id: str) -> TakenOver:
    """The search with these knobs whose job is most like this one, the latest of equals.

    A store that fails costs a warning: the search goes on without it.
    """
    _require_tracking(settings, AUTO)
    try:
        store = _open_store(settings)
        found = store.of_runner(settings.tracking.experiment, settings.runner.name)
        others = [s for s in found if s.search_id != own_id]
        others.sort(key=lambda s: -_alike(s.parameters, settings, runner))
        for search in others[:_LOOKED_AT]:
            seen, searched = _seen_in_store(store, search, settings, runner)
            earlier = seen.earlier(_name(search))
            if earlier is not None and not _unknown(searched, runner):
                return _taken(earlier)
    except Exception as error:  # as for the tracker, the store is never in the search's way
        text = f"{KEY}={AUTO}: the store cannot be read ({_short(error)}); nothing is taken over"
        return TakenOver(warning=text)
    return TakenOver(
        f"{KEY}={AUTO}: no earlier search of runner={settings.runner.name} with these knobs is in "
        f"the experiment {settings.tracking.experiment}; nothing is taken over"
    )


def _alike(parameters: Mapping[str, str], settings: Settings, runner: Runner) -> int:
    """In how many facts two jobs agree: the workload, and what the runner's trials hold for."""
    own = {f"identity/{name}": value for name, value in runner.identity().items()}
    own["workload"] = settings.workload.name
    return sum(parameters.get(name) == value for name, value in own.items())


def _seen_in_store(
    store: EarlierSearches, search: StoredSearch, settings: Settings, runner: Runner
) -> tuple[_Seen, set[str]]:
    """A stored search's trials in this one's knobs, and all the knobs that it searched."""
    from perfsearch.tracking.earlier import value_of
    from perfsearch.tracking.names import clean_key, plain

    seen, searched = _Seen(runner), set[str]()
    knobs = {clean_key(name): knob for name, knob in runner.space.by_name.items()}
    held = {clean_key(f"pinned/{name}"): plain(v) for name, v in runner.pinned.items()}
    fixed = {k: v for k, v in search.parameters.items() if k.startswith("pinned/")}
    if any(fixed.get(name, text) != text for name, text in held.items()):
        return seen, searched
    for trial in store.trials(search, settings.objective.metric):
        searched |= trial.configuration.keys()
        texts = {k.removeprefix("pinned/"): v for k, v in fixed.items()} | dict(trial.configuration)
        if any(texts.get(k.removeprefix("pinned/"), v) != v for k, v in held.items()):
            continue
        try:
            whole = {k.name: value_of(k, texts[name]) for name, k in knobs.items()}
        except LookupError:
            continue  # a value that is none of this search's
        seen.add(whole, trial.cost, trial.purpose)
    return seen, searched


def _unknown(searched: Iterable[str], runner: Runner) -> list[str]:
    """Knobs that were searched there and are neither searched nor held here."""
    return sorted(set(searched) - runner.space.by_name.keys() - set(runner.pinned))


def _require_known(name: str, searched: Iterable[str], runner: Runner) -> None:
    unknown = _unknown(searched, runner)
    if unknown:
        raise ConfigError(
            KEY,
            f"{KEY}={name}: it searched {', '.join(unknown)}, which this search does not know. "
            f"Its knobs are {', '.join(runner.space.by_name)}. Name a search of the same runner.",
        )


def _required(seen: _Seen, name: str, source: str) -> TakenOver:
    earlier = seen.earlier(source)
    if earlier is None:
        raise ConfigError(
            KEY,
            f"{KEY}={name}: {len(seen.points)} configurations measured there are ones of this "
            f"search's knobs ({', '.join(seen.runner.space.by_name)}); at least {FEWEST} are "
            f"needed. Name another search, or leave {KEY} out.",
        )
    return _taken(earlier)


def _require_tracking(settings: Settings, asked: str) -> None:
    if not settings.tracking.enabled:
        raise ConfigError(
            KEY,
            f"{KEY}={asked}: earlier searches are looked up in the tracking store, and "
            "tracking.enabled=false. Name a run directory instead, or enable tracking.",
        )


def _open_store(settings: Settings) -> EarlierSearches:
    from perfsearch.tracking.earlier import EarlierSearches
    from perfsearch.tracking.uri import locate

    return EarlierSearches(locate(settings.tracking.uri))


def _name(search: StoredSearch) -> str:
    return f"{search.name} (MLflow run {search.run_id})"


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
