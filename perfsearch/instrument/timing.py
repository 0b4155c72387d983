"""What times a scored window of a script: its instruments told where to mark, and then nobody."""

from __future__ import annotations

import torch

from perfsearch.instrument.optimizers import OPTIMIZER
from perfsearch.instrument.phases import OTHER, Phases
from perfsearch.instrument.script import Script
from perfsearch.instrument.transfers import Transfers
from perfsearch.workers.measure import make_clock, synchronize


class Timing:
    """Times the phases of a script's steps between ``begin`` and ``end``.

    Args:
        script: the instruments.

    Attributes:
        phases: of the window; ``None`` outside of one.
        transfers: copies of the window, on another device than the host where nothing is compiled.

    """

    def __init__(self, script: Script) -> None:
        self.phases: Phases | None = None
        self.transfers: Transfers | None = None
        self._script = script

    def begin(self, device: torch.device) -> None:
        """Begin a window, once the device has come to rest."""
        synchronize(device)
        phases = Phases(make_clock(device))
        if device.type != "cpu" and not self._script.is_compiled():
            # not in compiled code, which must not see other methods than it was compiled with
            self.transfers = Transfers(phases)
            self.transfers.watch()
        self._tell(phases)

    def end(self) -> None:
        """Mark nothing any more."""
        self._tell(None)
        if self.transfers is not None:
            self.transfers.undo()
            self.transfers = None

    def before_step(self) -> None:
        """Note that an optimizer's step begins."""
        if self.phases is not None:
            self.phases.mark(OTHER)

    def after_step(self) -> None:
        """Note that it ended, and the whole step with it."""
        if self.phases is not None:
            self.phases.mark(OPTIMIZER)
            self.phases.end_step()

    def _tell(self, phases: Phases | None) -> None:
        script = self._script
        self.phases = script.calls.phases = script.optimizers.phases = phases
        script.loaders.mark = script.losses.mark = None if phases is None else phases.mark
