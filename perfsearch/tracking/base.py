"""What the pipeline asks of a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from perfsearch.core.journal import Journal


class Tracker(Protocol):
    """A view of a search's journal. Whatever happens to it, no call blocks for long or raises."""

    @property
    def destination(self) -> Mapping[str, str]:
        """Where the search is shown; the journal keeps it, so that it can be shown there again."""

    @property
    def run_id(self) -> str | None:
        """The search's run, once there is one."""

    def open(self, journal: Journal) -> None:
        """Begin to show what the journal has, and from now on whatever is appended to it."""

    def close(self, status: str = "FINISHED") -> None:
        """End the search's run as FINISHED, FAILED or KILLED, within bounded time."""

    def how_to_open(self) -> str:
        """A line that tells how to look at it; empty where there is nothing to look at."""


class NoTracker:
    """Shows nothing, for ``tracking.enabled=false``."""

    @property
    def destination(self) -> Mapping[str, str]:
        """Nowhere."""
        return {}

    @property
    def run_id(self) -> None:
        """There is none."""

    def open(self, journal: Journal) -> None:
        """Show nothing."""

    def close(self, status: str = "FINISHED") -> None:
        """Nothing is open."""

    def how_to_open(self) -> str:
        """Nowhere to look."""
        return ""
