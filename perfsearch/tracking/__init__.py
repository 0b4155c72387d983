"""Views of the journal: MLflow, exports, reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.tracking.base import NoTracker, Tracker

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

__all__ = ["Tracker", "open_tracker", "store_files"]


def open_tracker(settings: Settings, run_dir: Path, search_id: str) -> Tracker:
    """The tracker that ``settings.tracking`` asks for.

    Raises:
        BadInputError: the tracking URI cannot be used.
    """
    if not settings.tracking.enabled:
        return NoTracker()
    from perfsearch.tracking import mlflow

    return mlflow.Tracker(settings.tracking.uri, settings.tracking.experiment, run_dir, search_id)


def store_files(settings: Settings) -> list[Path]:
    """Files and directories beside the run's that tracking writes to on this host.

    Raises:
        BadInputError: the tracking URI cannot be used.

    """
    if not settings.tracking.enabled:
        return []
    from perfsearch.tracking.location import locate

    return locate(settings.tracking.uri).files
