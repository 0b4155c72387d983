"""The searches of a sweep: a header for each, and a table of what they came to."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.pipeline.session import Result

_OF_THE_SAME_JOB = ("strategy", "seed", "budget")
"""First parts of keys between whose values searches are comparable."""

_OF_THE_SWEEP = ("hydra/launcher=", "hydra.launcher.")
"""Beginnings of words that say how jobs are started."""

_LEGEND = (
    "trials, seconds: of the search, until a trial was within {within:.0%} of the best that any "
    "search of this job found"
)

_OF_ONE = re.compile(r"\+*strategy\.(\w+)\.")
"""A key of one of several strategies."""


def _as_given(word: str, job: Sequence[str]) -> str:
    """A word of a job as the command takes it; empty where it is of a strategy that it has not."""
    of_one = _OF_ONE.match(word)
    if of_one is None:
        return word
    return word.lstrip("+") if f"strategy={of_one[1]}" in job else ""


def _column(key: str) -> str:
    """The column that a swept key is told in: options of a strategy are part of its name."""
    return "strategy" if key.lstrip("+").startswith("strategy.") else key


def _unconfirmed(result: Result) -> str:
    """The gain as far as single readings tell, as on the search's own card; empty where none do."""
    from perfsearch.cli.view import told_unconfirmed
    from perfsearch.core.trial import Purpose, Status
    from perfsearch.pipeline.session import BASELINE
    from perfsearch.tracking.best_so_far import baseline_readings

    confirmed = {arm: statistics.median(c) for arm, c in result.verdict.costs.items() if c}
    before = confirmed.pop(BASELINE, None)
    if before and confirmed:
        return told_unconfirmed(before / min(confirmed.values()), each=True)
    readings = [t.cost for t in baseline_readings(result.trials) if t.cost]
    tried = [t for t in result.trials if t.purpose is Purpose.SEARCH and t.status is Status.OK]
    best = min((t.cost for t in tried if t.cost), default=None)
    return (
        ""
        if best is None or not readings
        else told_unconfirmed(statistics.median(readings) / best, each=False)
    )


@dataclass
class Sweep:
    """A sweep: the words of each of its jobs; none where it is a single job.

    Attributes:
        jobs: ``KEY=VALUE`` words of each.

    """

    jobs: list[list[str]] = field(default_factory=list)

    def words(self, place: int) -> list[str] | None:
        """The words of a job by themselves, or ``None`` where there is but one job."""
        if len(self.jobs) < 2 or place >= len(self.jobs):
            return None
        job = [word for word in self.jobs[place] if not word.startswith(_OF_THE_SWEEP)]
        return [own for word in job if (own := _as_given(word, job))]

    def name(self, place: int) -> str:
        """What tells a job from the others; its place where its words are not known before."""
        if self.words(place) is None:
            return f"search {place + 1}"
        own = self.swept(place).items()
        return " ".join(f"{key}={value}" for key, value in own if value) or f"search {place + 1}"

    def show_header(self, place: int) -> None:
        """Say which job begins, where one comes after another."""
        print(f"\n== search {place + 1} of {len(self.jobs)}: {self.name(place)}", flush=True)

    def swept(self, place: int) -> dict[str, str]:
        """The keys in which jobs differ, and their values in one job."""
        mappings = [
            dict(word.lstrip("+").split("=", 1) for word in job if "=" in word) for job in self.jobs
        ]
        keys = [key for key in mappings[place] if len({m.get(key) for m in mappings}) > 1]
        job = self.jobs[place]
        return {
            key: value if _as_given(key, job) else ""
            for key, value in ((key, mappings[place][key]) for key in keys)
        }

    def show_outcomes(self, done: Sequence[tuple[Settings, Result | None]]) -> None:
        """Print the table, where there were several searches."""
        rows, remarks = self.table(done)
        if not rows:
            return
        from perfsearch.cli.layout import screen_width, table_lines, wrapped
        from perfsearch.tracking.best_so_far import WITHIN

        width = screen_width()
        print(f"\n== {len(rows) - 1} searches")
        for line in table_lines(rows, width, left=len(rows[0]) - 4):
            print(line)
        for text in (_LEGEND.format(within=WITHIN), *remarks):
            for line in wrapped(text, width):
                print(line, flush=True)
        from perfsearch.core.figures import show_path
        from perfsearch.core.journal import JournalError
        from perfsearch.tracking.sweep import write_beside

        run_dirs = [result.run_dir for _, result in done if result is not None]
        with suppress(JournalError, OSError):  # a page is not worth the exit code of the searches
            print(f"page  {show_path(write_beside(run_dirs))}", flush=True)

    def table(
        self, done: Sequence[tuple[Settings, Result | None]]
    ) -> tuple[list[list[str]], list[str]]:
        """A row for each search below a header, and what is to be said of them; nothing where fewer
        than two have a result.
        """
        found = [(place, *one) for place, one in enumerate(done) if one[1] is not None]
        if len(self.jobs) < 2 or len(found) < 2 or len(done) > len(self.jobs):
            return [], []
        from perfsearch.pipeline.cards import outcome
        from perfsearch.pipeline.resume import strategy_parameters
        from perfsearch.tracking.best_so_far import WITHIN, course, first_within
        from perfsearch.tracking.names import strategy_name

        keys = list(dict.fromkeys(_column(key) for key in self.swept(0)))
        rows = [[*keys, "gain (95% interval)", "trials", "seconds", "verdict"]]
        courses = {place: course(result.trials) for place, _, result in found if result}
        best: dict[str, float] = {}
        for place, reached in courses.items():
            job = self._job(place)
            best[job] = min([best.get(job, math.inf), *(one.cost for one in reached)])
        remarks = self._different_load(found)
        for place, settings, result in found:
            assert result is not None
            job = self._job(place)
            first = None if job in remarks else first_within(courses[place], best[job], WITHIN)
            trials = "-" if first is None else str(first.trials)
            seconds = "-" if first is None else f"{first.seconds:.1f}"
            interval = result.verdict.interval
            gain = _unconfirmed(result) if interval is None else interval.gain
            said = str(outcome(result))
            swept = {**self.swept(place), "strategy": strategy_name(strategy_parameters(settings))}
            rows.append([*(swept.get(key, "") for key in keys), gain, trials, seconds, said])
        return rows, list(remarks.values())

    def _different_load(
        self, found: Sequence[tuple[int, Settings, Result | None]]
    ) -> dict[str, str]:
        """What is to be said of jobs whose searches ran under different load, by job."""
        from perfsearch.tracking.best_so_far import references

        jobs: dict[str, list[Result]] = {}
        for place, _, result in found:
            if result is not None:
                jobs.setdefault(self._job(place), []).append(result)
        told = {}
        for job, results in jobs.items():
            trials = [result.trials for result in results]
            measured = next((t.measurement for own in trials for t in own if t.measurement), None)
            unit = results[0].objective.unit(measured)
            if line := references(trials, unit).different_load:
                told[job] = f"{job}: {line}" if len(jobs) > 1 else line
        return told

    def _job(self, place: int) -> str:
        """What the searches that are comparable have in common."""
        swept: Mapping[str, str] = self.swept(place)
        return " ".join(
            f"{key}={value}"
            for key, value in swept.items()
            if key.partition(".")[0] not in _OF_THE_SAME_JOB
        )
