"""What the pipeline tells a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from perfsearch.core.knob import Knob
from perfsearch.core.trial import Trial


class Tracker(Protocol):
    """A view of the search. Whatever happens to it, no call blocks for long or raises."""

    def open(
        self,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        knobs: Sequence[Knob] = (),
    ) -> None:
        """Begin the search's parent run."""

    def trial(self, trial: Trial) -> None:
        """Add a trial that ended."""

    def series(self, name: str, step: int, value: float) -> None:
        """Add a point to a series of the parent run."""

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str] | None = None, note: str = ""
    ) -> None:
        """Set the numbers by which searches are compared, and the note, on the parent run."""

    def artifacts(self, paths: Path | Sequence[Path]) -> None:
        """Add files or directories to the parent run."""

    def close(self, status: str = "FINISHED") -> None:
        """End the parent run as FINISHED, FAILED or KILLED, within bounded time."""

    def how_to_open(self) -> str:
        """A line that tells how to look at it; empty where there is nothing to look at."""


class NoTracker:
    """Keeps nothing, for ``tracking.enabled=false``."""

    def open(
        self,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        knobs: Sequence[Knob] = (),
    ) -> None:
        """Keep nothing."""

    def trial(self, trial: Trial) -> None:
        """Keep nothing."""

    def series(self, name: str, step: int, value: float) -> None:
        """Keep nothing."""

    def summary(
        self, metrics: Mapping[str, float], tags: Mapping[str, str] | None = None, note: str = ""
    ) -> None:
        """Keep nothing."""

    def artifacts(self, paths: Path | Sequence[Path]) -> None:
        """Keep nothing."""

    def close(self, status: str = "FINISHED") -> None:
        """Nothing is open."""

    def how_to_open(self) -> str:
        """Nowhere to look."""
        return ""
