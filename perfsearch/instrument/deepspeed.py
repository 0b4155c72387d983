"""DeepSpeed in a script: one step of its engine is one step, however often its optimizer is called.

Stages 1 and 2 call the inner optimizer once for each of its parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from perfsearch.instrument.imports import after_import
from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.patches import wrap

_ENGINE = "deepspeed.runtime.engine"


class Engines:
    """Every DeepSpeed engine that the script makes, once it imports DeepSpeed.

    Args:
        optimizers: whose steps are counted by the engine's from the first one on.

    Attributes:
        seen: whether an engine has stepped.

    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.seen = False
        self._optimizers = optimizers
        after_import(_ENGINE, self._meet)

    def _meet(self, module: ModuleType) -> None:
        wrap(module.DeepSpeedEngine, "_take_model_step", self._step)

    def _step(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.seen = True
        with self._optimizers.counted_from_outside():
            return original(*args, **kwargs)
