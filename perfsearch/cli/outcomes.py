"""The searches of a sweep: a header for each, and a table of what they came to."""

from __future__ import annotations

import math
import re
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
        rows = self.table(done)
        if not rows:
            return
        from perfsearch.cli.layout import screen_width, table_lines, wrapped
        from perfsearch.tracking.best_so_far import WITHIN

        width = screen_width()
        print(f"\n== {len(rows) - 1} searches")
        for line in table_lines(rows, width, left=len(rows[0]) - 4):
            print(line)
        for line in wrapped(_LEGEND.format(within=WITHIN), width):
            print(line, flush=True)
        from perfsearch.core.figures import show_path
        from perfsearch.core.journal import JournalError
        from perfsearch.tracking.sweep import write_beside

        run_dirs = [result.run_dir for _, result in done if result is not None]
        with suppress(JournalError, OSError):  # a page is not worth the exit code of the searches
            print(f"page  {show_path(write_beside(run_dirs))}", flush=True)

    def table(self, done: Sequence[tuple[Settings, Result | None]]) -> list[list[str]]:
        """A row for each search below a header; nothing where fewer than two have a result."""
        found = [(place, *one) for place, one in enumerate(done) if one[1] is not None]
        if len(self.jobs) < 2 or len(found) < 2 or len(done) > len(self.jobs):
            return []
        from perfsearch.pipeline.cards import outcome
        from perfsearch.tracking.best_so_far import WITHIN, course, first_within

        keys = list(self.swept(0))
        rows = [[*keys, "gain (95% interval)", "trials", "seconds", "verdict"]]
        courses = {place: course(result.trials) for place, _, result in found if result}
        best: dict[str, float] = {}
        for place, reached in courses.items():
            job = self._job(place)
            best[job] = min([best.get(job, math.inf), *(one.cost for one in reached)])
        for place, _, result in found:
            assert result is not None
            first = first_within(courses[place], best[self._job(place)], WITHIN)
            trials = "-" if first is None else str(first.trials)
            seconds = "-" if first is None else f"{first.seconds:.1f}"
            interval = result.verdict.interval
            gain = "" if interval is None else interval.gain
            said = str(outcome(result))
            rows.append([*self.swept(place).values(), gain, trials, seconds, said])
        return rows

    def _job(self, place: int) -> str:
        """What the searches that are comparable have in common."""
        swept: Mapping[str, str] = self.swept(place)
        return " ".join(
            f"{key}={value}"
            for key, value in swept.items()
            if key.partition(".")[0] not in _OF_THE_SAME_JOB
        )
