"""DeepSpeed in a script: one step of its engine is one step, however often its optimizer is called.

Stages 1 and 2 call the inner optimizer once for each of its parameter groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.patching import ENGINE, after_import, wrap
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import STAGE

_READ = {
    STAGE.name: "zero_optimization_stage",
    MICRO_BATCH.name: "train_micro_batch_size_per_gpu",
    ACCUMULATION.name: "gradient_accumulation_steps",
}
"""Method of the engine by the knob whose value it tells."""


class Engines:
    """Every DeepSpeed engine that the script makes, once it imports DeepSpeed.

    Args:
        optimizers: whose steps are counted by the engine's from the first one on.

    Attributes:
        seen: whether an engine has stepped.

    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.seen = False
        self._engine: weakref.ref[Any] | None = None
        self._optimizers = optimizers
        after_import(ENGINE, self._meet)

    def _meet(self, module: ModuleType) -> None:
        wrap(module.DeepSpeedEngine, "_take_model_step", self._step)

    def _step(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.seen = True
        if self._engine is None:
            self._engine = weakref.ref(args[0])
        with self._optimizers.counted_from_outside():
            return original(*args, **kwargs)

    def values(self) -> dict[str, Value]:
        """What is in force of the configuration, as the first engine itself has it."""
        engine = self._engine() if self._engine is not None else None
        if engine is None:
            return {}
        return {knob: int(getattr(engine, method)()) for knob, method in _READ.items()}
