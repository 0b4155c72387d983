"""What one operator takes of a step: as it was simulated, or as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class OperatorTime:
    """Milliseconds of a step, each the slowest device's.

    Attributes:
        forward_ms: of its own forward pass.
        backward_ms: of its own backward pass.
        communication_ms: of moving what it reads, and the gradients of that, packing included, and
            of summing the gradients of the parameters that are accounted for with it.

    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    communication_ms: float = 0.0

    @property
    def whole_ms(self) -> float:
        """All three; what is overlapped in a step counts as if it were not."""
        return self.forward_ms + self.backward_ms + self.communication_ms

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, float]) -> OperatorTime:
        """Rebuild it from ``to_json``."""
        return cls(**record)
