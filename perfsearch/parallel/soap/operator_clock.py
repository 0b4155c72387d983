"""Times spans of a step by operator: device events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from perfsearch.workers.measure import make_clock, synchronize

Owners = Sequence[tuple[int, float]]
"""Places of operators, each with its share of a span."""


class Column(IntEnum):
    """What a span is spent on, in the order of the fields of ``OperatorTime``."""

    FORWARD = 0
    BACKWARD = 1
    COMMUNICATION = 2


class OperatorClock:
    """Adds up the spans of one step.

    Args:
        operators: number of them.
        device: that is timed.

    """

    def __init__(self, operators: int, device: torch.device) -> None:
        self._operators, self._device = operators, device
        self._clock = make_clock(device)
        self._spans: list[tuple[Column, Owners, Any, Any]] = []

    @contextmanager
    def span(self, column: Column, owners: Owners) -> Iterator[None]:
        """What is launched within it belongs to these operators."""
        begin = self._clock.now()
        yield
        self._spans.append((column, owners, begin, self._clock.now()))

    def read(self) -> torch.Tensor:
        """Milliseconds since the last reading, (operators, columns); waits for the device."""
        synchronize(self._device)
        found = torch.zeros(self._operators, len(Column), dtype=torch.float64)
        for column, owners, begin, end in self._spans:
            spent_ms = 1e3 * self._clock.between(begin, end)
            for place, part in owners:
                found[place, column] += part * spent_ms
        self._spans.clear()
        return found
