"""torch's settings that hold for the whole process of a script."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perfsearch.core.knob import Value
from perfsearch.instrument.switch_names import SWITCHES


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
        wanted = {n: self._own[n] for n in SWITCHES}
        wanted.update({n: self._knobs[n] for n in SWITCHES if self._knobs.get(n) is not None})
        torch.backends.cudnn.benchmark = bool(wanted["cudnn_benchmark"])
        threads = int(wanted["omp_num_threads"] or 1)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Use other values from now on."""
        self._knobs = dict(knobs)
        self.put_into_force()

    @staticmethod
    def values() -> dict[str, Value]:
        """What holds now."""
        return {
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "omp_num_threads": torch.get_num_threads(),
        }
