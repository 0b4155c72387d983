"""The modules that a script trains: their memory layout, and compiling them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.instrument.optimizers import Optimizers
from perfsearch.knobs import model
from perfsearch.knobs.model import CHANNELS_LAST, COMPILE, SCOPE, graphs_compiled


class Models:
    """Finds what the script trains when it has made a step, and makes of it what the knobs say.

    Args:
        knobs: values to put into force; those that are ``None`` or absent are left alone.
        optimizers: of the script.

    Attributes:
        ignored: why what was asked for is not in force.

    """

    def __init__(self, knobs: Mapping[str, Value], optimizers: Optimizers) -> None:
        self.ignored: dict[str, str] = {}
        self._knobs = dict(knobs)
        self._optimizers = optimizers
        self._found: list[tuple[weakref.ref[Any], bool]] = []
        self._compiled: list[tuple[Any, list[Any]]] = []
        self._give_up: Callable[[], None] = lambda: None
        self._graphs = 0

    @property
    def live(self) -> list[tuple[Any, bool]]:
        """The outermost modules that still exist, and whether each had channels last."""
        return [(module, own) for ref, own in self._found if (module := ref()) is not None]

    @property
    def images(self) -> bool | None:
        """Whether they have convolutions over images; ``None`` before they were found."""
        if not self._found:
            return None
        return any(model.image_weights(module) for module, _ in self.live)

    @property
    def blocks(self) -> int | None:
        """How many blocks they repeat, the most of any; ``None`` before they were found."""
        if not self._found:
            return None
        return max((len(model.repeated_blocks(module)) for module, _ in self.live), default=0)

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled because it was asked for."""
        return bool(self._compiled)

    def find(self) -> bool:
        """Find them, put their layout into force, and have them compiled where that is asked for.

        In a script that compiles its model itself nothing is done to it.

        Returns:
            Whether weights have another layout now.

        """
        groups = [g for optimizer in self._optimizers.live for g in optimizer.param_groups]
        outermost = model.trained_modules(p for group in groups for p in group["params"])
        self._found = [(weakref.ref(m), model.is_channels_last(m)) for m in outermost]
        if graphs_compiled():
            asked = [r.name for r in model.RECORDS if r.of(self._knobs) is not None]
            self.ignored = {name: f"{name}: {model.COMPILES_ITSELF}" for name in asked}
            return False
        if model.is_compiled(self._knobs):
            model.import_compiler()
            self._compiled, self._give_up = model.compile_when_called(
                outermost, model.mode_of(self._knobs), model.in_blocks(self._knobs)
            )
        return self._lay_out()

    def end_search(self) -> None:
        """Compile nothing that is called later."""
        self._give_up()

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Use another layout from the next step on."""
        self._knobs = dict(knobs)
        self._lay_out()

    def _lay_out(self) -> bool:
        asked, changed = CHANNELS_LAST.of(self._knobs), False
        for module, own in self.live:
            wanted = own if asked is None else bool(asked)
            if model.image_weights(module) and model.is_channels_last(module) != wanted:
                model.lay_out(module, wanted, self._optimizers.live)
                changed = True
        return changed

    def begin_window(self) -> None:
        """Note that steps are scored from now on."""
        self._graphs = graphs_compiled()

    def end_window(self) -> None:
        """Note that they were; those in which code was compiled anew are not to be scored."""
        more = graphs_compiled() - self._graphs
        if self.compiles and more:
            self.ignored[COMPILE.name] = model.why_not_scored(self._knobs, more)

    def values(self) -> dict[str, Value]:
        """What is in force."""
        if not self._found:
            return {}
        convolving = [module for module, _ in self.live if model.image_weights(module)]
        last = bool(convolving) and all(model.is_channels_last(m) for m in convolving)
        found: dict[str, Value] = {CHANNELS_LAST.name: last}
        done = self.compiles and graphs_compiled() > 0
        if done or not graphs_compiled():
            found[COMPILE.name] = COMPILE.of(self._knobs) if done else model.NOT_COMPILED
        if done:
            found[SCOPE.name] = model.scope_of(self._compiled)
        return found
