"""Tuning while it trains: a running job's wrapper takes other settings between two steps.

Importing this imports no torch; ranks import neither Hydra, MLflow nor scikit-learn at any time.
"""

from __future__ import annotations

from perfsearch.online.options import AutotuneOptions

__all__ = ["AutotuneOptions", "enable"]


def enable(options: AutotuneOptions) -> None:
    """Tune every model that a script wraps with DistributedDataParallel from now on.

    Called in each rank before the script starts. The script's own arguments are where tuning
    starts from. A second call changes the options for wrappers made after it.
    """
    from perfsearch.online.enabling import patch

    patch(options)
