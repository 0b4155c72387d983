"""Tuning while it trains: a running job's wrapper takes other settings between two steps.

Importing this imports no torch; ranks import neither Hydra, MLflow nor scikit-learn at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfsearch.online.options import AutotuneOptions

__all__ = ["AutotuneOptions", "disable", "enable"]


def enable(options: AutotuneOptions | Mapping[str, Any]) -> None:
    """Tune every model that a script wraps with DistributedDataParallel from now on.

    Called in each rank before the script starts. The script's own arguments are where tuning
    starts from. A second call changes the options for wrappers made after it.

    Args:
        options: the same on every rank; a mapping is checked first.

    Raises:
        ConfigError: an option cannot be honoured.

    """
    from perfsearch.online.rank import patch_wrappers

    if not isinstance(options, AutotuneOptions):
        options = AutotuneOptions.from_mapping(options)
    patch_wrappers(options)


def disable() -> None:
    """Leave alone what is wrapped from now on; what is being tuned goes on."""
    from perfsearch.online.rank import leave_wrappers

    leave_wrappers()
