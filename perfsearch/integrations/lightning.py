"""Callbacks for the ``Trainer`` of Lightning, imported as ``lightning`` or ``pytorch_lightning``.

``AutotuneCallback`` tunes a run while it trains, ``ApplyCallback`` sets what a search has found:

    from perfsearch.integrations.lightning import ApplyCallback, AutotuneCallback

    Trainer(strategy="ddp", callbacks=[AutotuneCallback(log_file="tuning.csv")]).fit(module)
    Trainer(strategy="ddp", callbacks=[ApplyCallback("outputs/RUN/best/config.yaml")]).fit(module)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsearch.integrations.training_run import Applying, Tuning

_OLD_NAME = "pytorch_lightning"

_is_old = _OLD_NAME in sys.modules and "lightning" not in sys.modules
Callback: Any = importlib.import_module(_OLD_NAME if _is_old else "lightning.pytorch").Callback


class AutotuneCallback(Callback):  # type: ignore[misc]
    """Tunes the strategy's ``DistributedDataParallel`` while the run trains.

    As ``perfsearch.autotune`` does: the best settings stay for the rest of the training.

    Args:
        options: of ``perfsearch.autotune``, such as ``log_file`` or ``max_samples``.

    Raises:
        BadInputError: an option that there is not, or a value that it cannot have.

    """

    def __init__(self, **options: Any) -> None:
        self._tuning = Tuning(options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Tune what the strategy wraps for training."""
        if stage == "fit":
            self._tuning.before_wrapping()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave alone what is wrapped later."""
        self._tuning.after_wrapping()


class ApplyCallback(Callback):  # type: ignore[misc]
    """Sets what a search has found in what the run builds: wrapper, optimizer, and its loaders.

    A ``DataLoader`` that was made before ``fit`` stays as it is, which is said: give its arguments
    yourself, or call ``perfsearch.apply(source)`` at the beginning of the script instead.

    Args:
        source: ``best/config.yaml`` of a search, its run directory, or settings by name.

    Raises:
        BadInputError: there are none to be had from it.

    """

    def __init__(self, source: str | Path | Mapping[str, Any]) -> None:
        self._applying = Applying(source)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have what is built for training take the settings."""
        if stage == "fit":
            self._applying.before_building()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Say on the first rank what is in force."""
        self._applying.report(trainer.global_step, trainer.is_global_zero)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say it where training was too short before."""
        self._applying.report(leads=trainer.is_global_zero)
