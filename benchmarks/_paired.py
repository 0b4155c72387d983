"""Blocks of one kind against blocks of another, in pairs: by how much they take longer."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

STRETCHES, DRAWS = 200, 1000


@dataclass(frozen=True)
class Excess:
    """A ratio less one, with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2%} | {self.low:+.2%} to {self.high:+.2%}"


@dataclass(frozen=True)
class _Stretch:
    """Consecutive rounds: the ratios of their pairs, and what both sides took."""

    ratios: list[float]
    own: float
    other: float


def compare(
    seconds: list[float], references: list[list[float]], generator: random.Random
) -> tuple[Excess, Excess]:
    """Median of the pairs' ratios and ratio of the means, less one.

    A pair is of one block and one block: a mean of two is no fair match for one, since of times
    with a long tail it has the higher median. Blocks near to one another are not independent, so
    that the bootstrap draws whole stretches of rounds.

    Args:
        seconds: of a block in each round.
        references: of the blocks that each is paired with in its round.
        generator: of the bootstrap.

    """
    length = max(1, len(seconds) // STRETCHES)
    stretches = []
    for at in range(0, len(seconds) - length + 1, length):
        rounds = range(at, at + length)
        others = [reference[r] for reference in references for r in rounds]
        own = [seconds[r] for r in rounds]
        ratios = [a / b for a, b in zip(own * len(references), others, strict=True)]
        stretches.append(_Stretch(ratios, sum(own), sum(others) / len(references)))
    drawn = [_estimate(generator.choices(stretches, k=len(stretches))) for _ in range(DRAWS)]
    middle, mean = zip(*drawn, strict=True)
    value = _estimate(stretches)
    return _excess(value[0], sorted(middle)), _excess(value[1], sorted(mean))


def _estimate(stretches: list[_Stretch]) -> tuple[float, float]:
    middle = statistics.median(ratio for stretch in stretches for ratio in stretch.ratios)
    return middle, sum(s.own for s in stretches) / sum(s.other for s in stretches)


def _excess(value: float, drawn: list[float]) -> Excess:
    edge = len(drawn) // 40
    return Excess(value - 1, drawn[edge] - 1, drawn[-edge - 1] - 1)
