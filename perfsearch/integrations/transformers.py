"""Callbacks for the ``Trainer`` of Hugging Face transformers.

``AutotuneCallback`` tunes a run while it trains, ``ApplyCallback`` sets what a search has found:

    from perfsearch.integrations.transformers import ApplyCallback, AutotuneCallback

    Trainer(..., callbacks=[AutotuneCallback(log_file="tuning.csv")]).train()
    Trainer(..., callbacks=[ApplyCallback("outputs/RUN/best/config.yaml")]).train()
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from perfsearch.integrations.training_run import Applying, Tuning


class AutotuneCallback(TrainerCallback):  # type: ignore[misc]
    """Tunes the Trainer's ``DistributedDataParallel`` while it trains.

    As ``perfsearch.autotune`` does: the best settings stay for the rest of the training.

    Args:
        options: of ``perfsearch.autotune``, such as ``log_file`` or ``max_samples``.

    Raises:
        BadInputError: an option that there is not, or a value that it cannot have.

    """

    def __init__(self, **options: Any) -> None:
        self._tuning = Tuning(options)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Tune what the Trainer wraps when it begins to train."""
        self._tuning.before_wrapping()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Leave alone what is wrapped later."""
        self._tuning.after_wrapping()


class ApplyCallback(TrainerCallback):  # type: ignore[misc]
    """Sets what a search has found in what the Trainer builds: wrapper, loader, optimizer.

    Args:
        source: ``best/config.yaml`` of a search, its run directory, or settings by name.

    Raises:
        BadInputError: there are none to be had from it.

    """

    def __init__(self, source: str | Path | Mapping[str, Any]) -> None:
        self._applying = Applying(source)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Have what the Trainer builds from now on take the settings."""
        self._applying.before_building()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say on the first rank what is in force."""
        self._applying.report(state.global_step, state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say it where training was too short before."""
        self._applying.report(leads=state.is_world_process_zero)
