"""What the pipeline tells a tracker; this one keeps nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perfsearch.search.knob import Value
from perfsearch.search.trial import Trial


class Tracker:
    """A view of the search. Whatever happens to it, no call blocks or raises."""

    def open(self, parameters: Mapping[str, Value], tags: Mapping[str, str]) -> None:
        """Begin the search's parent run."""

    def trial(self, trial: Trial) -> None:
        """Add a trial that ended."""

    def series(self, name: str, step: int, value: float) -> None:
        """Add a point to a series of the parent run."""

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str] | None = None, note: str = ""
    ) -> None:
        """Set the numbers by which searches are compared, and the note, on the parent run."""

    def artifacts(self, run_dir: Path) -> None:
        """Add the files of the run directory to the parent run."""

    def close(self, status: str) -> None:
        """End the parent run as FINISHED, FAILED or KILLED, within bounded time."""

    def how_to_open(self) -> str:
        """A line that tells how to look at it; empty where there is nothing to look at."""
        return ""
