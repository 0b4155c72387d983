"""What times a scored window of a script: its instruments told where to mark, and then nobody."""

from __future__ import annotations

import torch

from perfsearch.instrument.optimizers import OPTIMIZER
from perfsearch.instrument.phases import OTHER, Phases
from perfsearch.instrument.script import Script
from perfsearch.instrument.transfers import Transfers
from perfsearch.workers.measure import make_clock, synchronize
from perfsearch.workers.settling import is_detailed


class Timing:
    """Times a script's steps between ``begin`` and ``end``, and the phases of some of them.

    In the other steps the instruments are told of no window, so that they cost short steps little.

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
        self._each, self._made, self._detailed = 1, 0, False

    def begin(self, device: torch.device, each: int = 1) -> None:
        """Begin a window, once the device has come to rest.

        Args:
            device: that the script uses.
            each: of how many steps one has its phases timed.

        """
        synchronize(device)
        self.phases = Phases(make_clock(device))
        if device.type != "cpu" and not self._script.is_compiled():
            # not in compiled code, which must not see other methods than it was compiled with
            self.transfers = Transfers(self.phases)
            self.transfers.watch()
        self._each, self._made, self._detailed = each, 0, is_detailed(0, each)
        self._tell()

    def end(self) -> None:
        """Mark nothing any more."""
        self.phases, self._detailed = None, False
        self._tell()
        if self.transfers is not None:
            self.transfers.undo()
            self.transfers = None

    def before_step(self) -> None:
        """Note that an optimizer's step begins."""
        if self.phases is not None and self._detailed:
            self.phases.mark(OTHER)

    def after_step(self) -> None:
        """Note that it ended, and the whole step with it."""
        if self.phases is None:
            return
        if self._detailed:
            self.phases.mark(OPTIMIZER)
        self.phases.end_step()
        self._made += 1
        detailed = is_detailed(self._made, self._each)
        if detailed != self._detailed:
            self._detailed = detailed
            self._tell()

    def _tell(self) -> None:
        script, phases = self._script, self.phases if self._detailed else None
        script.calls.phases = script.optimizers.phases = phases
        script.loaders.mark = script.losses.mark = None if phases is None else phases.mark
        if self.transfers is not None:
            self.transfers.watching = self._detailed
