"""The page of a sweep: its searches side by side, against one baseline for all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from perfsearch.core.journal import JOURNAL, legible, read
from perfsearch.core.objective import Metric, Objective
from perfsearch.core.trial import Trial
from perfsearch.core.verdict import Interval
from perfsearch.tracking.best_so_far import WITHIN, Reached, course, first_within, references
from perfsearch.tracking.canvas import LEFT, RIGHT, Axis, Canvas
from perfsearch.tracking.names import GAIN, OF_STRATEGY, flat, strategy_name
from perfsearch.tracking.pictures import colour, duration
from perfsearch.tracking.report import drawn, write_page

_TEMPLATE = "sweep.html.jinja"

_OF_THE_SEARCH = ("strategy", "seed")
"""Parameters in which searches of one job differ; by all others the jobs do."""


@dataclass(frozen=True)
class Searched:
    """A search, as its journal tells it.

    Attributes:
        run_dir: its directory.
        parameters: what tells it apart from others.
        trials: without their measurements.
        interval: speed-up of what is handed over, else of the finalist that came nearest; ``None``
            where nothing was confirmed.
        verdict: a word or two; empty for a search that has not ended.
        unit: of the objective.

    """

    run_dir: Path
    parameters: Mapping[str, str]
    trials: Sequence[Trial]
    interval: Interval | None
    verdict: str
    unit: str

    @classmethod
    def read(cls, run_dir: Path) -> Searched:
        """Read a run directory.

        Raises:
            JournalError: its journal cannot be read.

        """
        path = run_dir / JOURNAL
        trials: dict[int, Trial] = {}
        said: dict[str, Any] = {}
        measured = None
        for event in read(path)[1]:
            with legible(path, event):
                if event.name == "finished":
                    told = event.data["trial"]
                    if measured is None and told.get("measurement"):
                        measured = Trial.from_json(told).measurement
                    trial = Trial.from_json({**told, "measurement": None})
                    trials[trial.number] = trial
                said[event.name] = event.data
        tags = said.get("summarised", {}).get("tags", {})
        intervals = {
            int(number): Interval(**found)
            for number, found in said.get("confirmed", {}).get("intervals", {}).items()
        }
        opened = said.get("opened", {})
        metric = Metric(opened.get("definition", {}).get("objective", Metric.THROUGHPUT))
        nearest = max(intervals.values(), key=lambda found: found.ratio, default=None)
        return cls(
            run_dir,
            _parameters(opened.get("parameters", {})),
            list(trials.values()),
            intervals.get(int(tags.get("perfsearch.best_trial", 0)), nearest),
            str(tags.get("perfsearch.verdict", "")).replace("_", " "),
            Objective(metric).unit(measured),
        )

    @cached_property
    def course(self) -> list[Reached]:
        """The best after each of its trials."""
        return course(self.trials)


def _parameters(told: Mapping[str, Any]) -> dict[str, str]:
    """What tells a search apart; the strategy is one of them, its options included."""
    found = {key: v for key, v in flat(told).items() if not key.startswith(OF_STRATEGY)}
    return found | ({"strategy": strategy_name(told)} if "strategy" in found else {})


def write_beside(run_dirs: Sequence[Path]) -> Path:
    """Write the page of a sweep beside the directories of its searches, and return its path.

    The same searches have the same page, whoever asks for it, and others have another.

    Raises:
        JournalError: a journal cannot be read.
        OSError: it cannot be written.

    """
    names = "\n".join(str(run_dir) for run_dir in run_dirs)
    digest = hashlib.sha256(names.encode()).hexdigest()[:8]
    path = Path(os.path.commonpath([d.parent for d in run_dirs])) / f"sweep-{digest}.html"
    write_sweep(path, run_dirs)
    return path


def write_sweep(path: Path, run_dirs: Sequence[Path]) -> None:
    """Write the page of some searches, those of each job together.

    Args:
        path: the file.
        run_dirs: of the searches, in the order in which they are listed.

    Raises:
        JournalError: a journal cannot be read.
        OSError: it cannot be written.

    """
    searches = [Searched.read(run_dir) for run_dir in run_dirs]
    jobs: dict[str, list[Searched]] = {}
    apart = _differing([search.parameters for search in searches])
    for search in searches:
        keys = [key for key in apart if key not in _OF_THE_SEARCH]
        name = " ".join(f"{key}={search.parameters.get(key, '')}" for key in keys)
        jobs.setdefault(name, []).append(search)
    write_page(
        path,
        _TEMPLATE,
        title=f"{len(searches)} searches",
        jobs=[_job(name, found, path.parent) for name, found in jobs.items()],
        within=f"{WITHIN:.0%}",
    )


def _differing(parameters: Sequence[Mapping[str, str]]) -> list[str]:
    """The parameters in which searches differ."""
    names = dict.fromkeys(name for each in parameters for name in each)
    return [name for name in names if len({each.get(name) for each in parameters}) > 1]


def _job(name: str, searches: Sequence[Searched], directory: Path) -> dict[str, Any]:
    """What the page says of the searches of one job."""
    apart = _differing([search.parameters for search in searches])
    reference = references([search.trials for search in searches], searches[0].unit)
    comparable = not reference.different_load
    best = min((s.course[-1].cost for s in searches if s.course), default=None)
    named = _labelled(searches, apart)
    labelled = {label: s for label, s in named.items() if s.course}
    baselines = dict(zip(named, reference.costs, strict=True))
    gains = {
        label: [(one, 100 * (baseline / one.cost - 1)) for one in s.course]
        for label, s in labelled.items()
        if (baseline := baselines[label])
    }
    kinds = {
        label: s.parameters.get("strategy", "") if "strategy" in apart else label
        for label, s in labelled.items()
    }
    rows = []
    for search, baseline in zip(searches, reference.costs, strict=True):
        found = first_within(search.course, best, WITHIN) if best and comparable else None
        reading = search.course[-1].cost if search.course else None
        rows.append(
            {
                "words": [search.parameters.get(key, "") for key in apart],
                "speed_up": "" if search.interval is None else search.interval.gain,
                "reading": f"{baseline / reading - 1:+.1%}" if baseline and reading else "",
                "trials": "" if found is None else str(found.trials),
                "seconds": "" if found is None else duration(found.seconds),
                "verdict": search.verdict,
                "report": os.path.relpath(search.run_dir / "report.html", directory),
            }
        )
    return {
        "name": name,
        "apart": apart,
        "different_load": reference.different_load,
        "rows": rows,
        "table": _by_strategy_and_seed(searches),
        "curves": [
            drawn(partial(curves, gains, kinds, "the common" if comparable else "its own", by))
            for by in ("trials", "seconds")
        ]
        if gains
        else [],
    }


def _labelled(searches: Sequence[Searched], apart: Sequence[str]) -> dict[str, Searched]:
    """Searches by a name of their own, the strategy first where they differ in it."""
    keys = sorted(apart, key=lambda key: key != "strategy")
    found: dict[str, Searched] = {}
    for search in searches:
        name = " ".join(search.parameters.get(key, "") for key in keys) or search.run_dir.name
        found[name if name not in found else f"{name} ({search.run_dir.name})"] = search
    return found


def _by_strategy_and_seed(searches: Sequence[Searched]) -> list[list[str]]:
    """Confirmed speed-ups, a row a strategy below a header of seeds; empty without several."""
    cells: dict[tuple[str, str], list[str]] = {}
    for search in searches:
        strategy, seed = (search.parameters.get(key, "") for key in _OF_THE_SEARCH)
        told = "-" if search.interval is None else f"{search.interval.ratio - 1:+.0%}"
        if search.verdict and search.verdict != GAIN:
            told = search.verdict
        cells.setdefault((strategy, seed), []).append(told)
    strategies = list(dict.fromkeys(strategy for strategy, _ in cells))
    seeds = list(dict.fromkeys(seed for _, seed in cells))
    if len(strategies) < 2 and len(seeds) < 2:
        return []
    header = ["", *(f"seed={seed}" for seed in seeds)]
    return [
        header,
        *(
            [strategy, *(", ".join(cells.get((strategy, seed), [])) for seed in seeds)]
            for strategy in strategies
        ),
    ]


def curves(
    gains: Mapping[str, Sequence[tuple[Reached, float]]],
    kinds: Mapping[str, str],
    whose: str,
    by: str,
    width: float,
) -> Canvas | None:
    """The gain of each search's best so far, by ``trials`` or ``seconds``.

    Those of one kind, which are those of one strategy, have one colour.

    Args:
        gains: each search's course, with the gain over a baseline in percent.
        kinds: of each search.
        whose: baseline that is.
        by: what the axis counts.
        width: of the picture.

    """
    points = {
        label: [(float(getattr(one, by)), gain) for one, gain in found]
        for label, found in gains.items()
    }
    every = [point for found in points.values() for point in found]
    most = max(x for x, _ in every)
    if most <= 0:
        return None
    styles = {kind: colour(place) for place, kind in enumerate(dict.fromkeys(kinds.values()))}
    canvas = Canvas(width, 0, f"best so far by {by}")
    top = canvas.key(styles, LEFT, 30, 0)
    canvas.height = top + 270
    x = Axis(0.0, most, LEFT, width - RIGHT, whole=by == "trials")
    y = Axis.around([0.0, *(value for _, value in every)], canvas.height - 46, top)
    canvas.frame(x, y, by, f"gain over {whose} baseline in percent")
    canvas.line((LEFT, y(0.0)), (width - RIGHT, y(0.0)), "baseline-line")
    for label, found in points.items():
        steps = [(x(found[0][0]), y(found[0][1]))]
        for at, value in found[1:]:
            steps += [(x(at), steps[-1][1]), (x(at), y(value))]
        canvas.path(steps, f"line {styles[kinds[label]]}", label)
    return canvas
