"""The instruments of one process together, and what they say of its script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from perfsearch.core.knob import Value
from perfsearch.instrument.ddp import Wrappers
from perfsearch.instrument.deepspeed import Engines
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.fsdp import Sharding
from perfsearch.instrument.loaders import Loaders
from perfsearch.instrument.models import Models
from perfsearch.instrument.operators import Operators
from perfsearch.instrument.optimizers import Losses, Optimizers
from perfsearch.instrument.parts import Parts
from perfsearch.instrument.phases import Calls
from perfsearch.instrument.rounding import Rounding
from perfsearch.knobs import process
from perfsearch.knobs.collection import Collection

_FRAMEWORKS = {
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers.trainer": "hf-trainer",
    "accelerate": "accelerate",
}
"""Module to name; the first that the script has imported is what it is called."""


class Script:
    """Instruments for everything that a script builds once they are made.

    Args:
        knobs: values to put into force; ``None`` and absent ones leave the script's own.
        perturbed: whether weights are changed after the first step by what rounding does.

    Attributes:
        steps: that the leading optimizer has made.
        backward_passes: that have begun, where losses are kept.
        on_backward: told of each.

    """

    def __init__(self, knobs: Mapping[str, Value], perturbed: bool = False) -> None:
        self.knobs = dict(knobs)
        self.wrappers = Wrappers(knobs)
        self.sharding = Sharding(knobs)
        self.loaders = Loaders(knobs)
        self.optimizers = Optimizers(knobs)
        self.models = Models(knobs, self.optimizers)
        self.rounding = Rounding(self.optimizers)
        self._perturbed = perturbed
        self.engines = Engines(self.optimizers)
        self.switches = Switches(knobs)
        self.collection = Collection()
        self.losses = Losses(lambda: bool(self.wrappers.live), self._note_backward)
        self.operators = Operators()
        self.calls = Calls()
        self.steps = 0
        self.backward_passes = 0
        self.on_backward: Callable[[], None] | None = None
        self.parts = self.loaders.parts = self.losses.parts = Parts()

    def _note_backward(self, roots: tuple[Any, ...]) -> None:
        self.backward_passes += 1
        self.operators.backward(roots)
        if self.on_backward is not None:
            self.on_backward()
        self.loaders.accounting.backward()
        self.loaders.forward.end()
        self.wrappers.note_backward()

    def put_into_force(self) -> None:
        """Set what goes after the script's own settings: called when its first step begins."""
        self.switches.put_into_force()
        self.collection.put(self.knobs)
        self.sharding.put_into_force()
        self.operators.look_again()

    def end_step(self) -> None:
        """Note that a step is over; after the first one it can be told what is trained."""
        self.steps += 1
        self.operators.end_step()
        self.collection.end_step()
        if self.steps == 1 and self._perturbed:
            self.rounding.perturb()
        if self.steps == 1 and not (self.sharding.kinds or self.engines.seen):
            if self.models.find() and not self.wrappers.why_not_again():
                self.wrappers.wrap_again(self.knobs)  # buckets have the layout of the weights
        elif self.steps == 2:
            self.models.end_search()
            self.rounding.end_watch()

    def change(self, knobs: Mapping[str, Value], perturbed: bool = False) -> None:
        """Put the knobs of ``step`` scope into force, between two steps.

        Args:
            knobs: all of them.
            perturbed: whether weights are changed by what rounding does, too.

        """
        self.knobs = dict(knobs)
        self.models.change(knobs)  # first, since buckets have the layout of the weights
        self.wrappers.wrap_again(knobs)
        self.sharding.change(knobs)
        self.optimizers.change(knobs)
        self.switches.change(knobs)
        self.collection.put(knobs)
        self.operators.look_again()
        if perturbed:
            self.rounding.perturb()

    def why_not_again(self) -> str:
        """Why other settings need another start of the script; empty where they do not."""
        if self.is_compiled():
            return "the model is compiled"
        if self.engines.seen:
            return "DeepSpeed's engine keeps weights of its own"
        return self.wrappers.why_not_again() or self.sharding.why_not_again()

    def values(self) -> dict[str, Value]:
        """What is in force, by knob name, as the libraries themselves have it."""
        return {
            **self.switches.values(),
            **self.collection.values(),
            **self.wrappers.values(),
            **self.sharding.values(),
            **self.loaders.values(),
            **self.optimizers.values(),
            **self.models.values(),
            **self.engines.values(),
        }

    def facts(self) -> Facts:
        """What the script has built so far."""
        wrappers = ["ddp"] if self.wrappers.live else []
        wrappers += ["deepspeed"] if self.engines.seen else []
        return Facts(
            wrappers=wrappers + self.sharding.kinds,
            loaders=self.loaders.made,
            optimizers=[type(optimizer).__name__ for optimizer in self.optimizers.live],
            values=self.values(),
            ignored={
                **self.optimizers.ignored,
                **self.models.ignored,
                **self._not_attended(),
            },
            draws_in_loader=self.loaders.draws,
            draws_in_forward=self.loaders.forward.draws,
            compiled=self.is_compiled() and not self.models.compiles,
            backend=_backend(),
            framework=next((name for m, name in _FRAMEWORKS.items() if m in sys.modules), ""),
            loss_dtype=self.losses.dtype,
            shared_out=self.loaders.shared_out,
            accumulates=self.wrappers.accumulates,
            implementations=self.optimizers.implementations(),
            parameters=self.optimizers.parameters(),
            convolutional=self.operators.convolutional,
            modules=len(self.models.live),
            images=self.models.images,
            blocks=self.models.blocks,
            attention=self.operators.attention,
        )

    def _not_attended(self) -> dict[str, str]:
        knob = process.ATTENTION
        why = process.why_not_attending(knob.of(self.knobs), self.operators.attention)
        return {knob.name: why} if why else {}

    @staticmethod
    def is_compiled() -> bool:
        """Whether torch has compiled any of it."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo is not None and bool(dynamo.counters["stats"])


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""


# -----------------------------------------------------------------------------
# torch's settings that hold for the whole process of a script.


class Switches:
    """Settings that are put into force when the first step begins, after the script's own.

    Args:
        knobs: values; those that are ``None`` or absent are left alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self._knobs = dict(knobs)
        self._own: dict[str, Value] | None = None

    def put_into_force(self) -> None:
        """Set what the knobs name; what the script had set is kept for ``change``."""
        if self._own is None:
            self._own = self.values()
        process.apply({**self._own, **{n: v for n, v in self._knobs.items() if v is not None}})

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Use other values from now on."""
        self._knobs = dict(knobs)
        self.put_into_force()

    @staticmethod
    def values() -> dict[str, Value]:
        """What holds now."""
        return process.values()
