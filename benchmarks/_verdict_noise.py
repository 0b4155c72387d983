"""Simulated readings whose truth is known, with the noise that machines have.

All readings are logs of costs, so that a difference is a shift, and many comparisons are drawn at
once: arrays of (comparison, arm, block) for starts, of (comparison, step) inside one start. Arm 0
is the baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perfsearch.core.verdict import block_orders

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

# -----------------------------------------------------------------------------
# Between starts.

StartNoise = Callable[[np.random.Generator, Places], Floats]
"""From a generator and each process's place in the sequence of processes to its error."""


def _own(generator: np.random.Generator, place: Places, sd: float) -> Floats:
    return sd * generator.standard_normal(place.shape)


def offsets(sd: float) -> StartNoise:
    """Each process has an offset of its own."""
    return lambda generator, place: _own(generator, place, sd)


def drift(size: float) -> StartNoise:
    """Everything gets slower, or faster, by ``size`` over the comparison; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        way = generator.choice([-1.0, 1.0], (len(place), 1, 1))
        return _own(generator, place, 0.01) + way * size * place / (place.max() + 1)

    return draw


def jump(size: float) -> StartNoise:
    """Everything is slower from some process on; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        at = generator.integers(1, place.max() + 1, (len(place), 1, 1))
        return _own(generator, place, 0.01) + size * (place >= at)

    return draw


def periodic(size: float, period: float) -> StartNoise:
    """Load with a period of so many processes; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        phase = 2 * np.pi * generator.random((len(place), 1, 1))
        return _own(generator, place, 0.01) + size * np.sin(2 * np.pi * place / period + phase)

    return draw


def first_slower(size: float) -> StartNoise:
    """The first process of each block is slower; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        return _own(generator, place, 0.01) + size * (place % place.shape[1] == 0)

    return draw


def heavy(scale: float, degrees: float) -> StartNoise:
    """Errors by Student's t."""
    return lambda generator, place: scale * generator.standard_t(degrees, place.shape)


def outliers(share: float, size: float) -> StartNoise:
    """Some processes are slower by about ``size``; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        hit = generator.random(place.shape) < share
        return _own(generator, place, 0.01) + size * generator.exponential(1, place.shape) * hit

    return draw


def unequal(baseline: float, other: float) -> StartNoise:
    """One arm's processes vary by more than the other's."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        errors = generator.standard_normal(place.shape)
        errors[:, 0] *= baseline
        errors[:, 1:] *= other
        return errors

    return draw


def two_kinds(share: float, size: float, both: bool = True) -> StartNoise:
    """A share of the processes (of both arms, or of the other one) is slower; and 1% a process.

    The true difference is that of the means of logs.
    """

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        kinds = size * ((generator.random(place.shape) < share) - share)
        if not both:
            kinds[:, 0] = 0
        return _own(generator, place, 0.01) + kinds

    return draw


def slow_steps(share: float, times: float, steps: int = 20) -> StartNoise:
    """A reading is the mean of so many steps, some of which are slow; and 1% a process."""

    def draw(generator: np.random.Generator, place: Places) -> Floats:
        slow = generator.binomial(steps, share, place.shape)
        return _own(generator, place, 0.01) + np.log1p(slow * (times - 1) / steps)

    return draw


STARTS: dict[str, StartNoise] = {
    "offsets of 1%": offsets(0.01),
    "offsets of 3%": offsets(0.03),
    "offsets of 6%": offsets(0.06),
    "drift of 10%": drift(0.10),
    "a jump of 10%": jump(0.10),
    "load of 5%, period 4 processes": periodic(0.05, 4),
    "load of 5%, period 6": periodic(0.05, 6),
    "load of 5%, period 3.3": periodic(0.05, 3.3),
    "load of 5%, period 10": periodic(0.05, 10),
    "the first of a block slower by 5%": first_slower(0.05),
    "heavy tails (t of 3, 1%)": heavy(0.01, 3),
    "1 in 10 slower by about 20%": outliers(0.1, 0.2),
    "unequal arms (1% and 6%)": unequal(0.01, 0.06),
    "unequal arms (6% and 1%)": unequal(0.06, 0.01),
    "two kinds (30% slower by 8%)": two_kinds(0.3, 0.08),
    "two kinds (10% slower by 15%)": two_kinds(0.1, 0.15),
    "slow steps (2% of steps, threefold)": slow_steps(0.02, 3.0),
}

ONE_ARM: dict[str, StartNoise] = {
    "two kinds in one arm (30% by 8%)": two_kinds(0.3, 0.08, both=False),
    "two kinds in one arm (10% by 15%)": two_kinds(0.1, 0.15, both=False),
}
"""What no statistic of a few processes can see: where the slow kind has not shown yet."""


Orders = NDArray[np.int64]
"""Places of the arms within each block, of many sequences of blocks: (sequence, arm, block)."""


@functools.cache
def chosen_orders(blocks: int, sequences: int = 200) -> Orders:
    """As perfsearch draws them."""
    drawn = np.array([block_orders(seed, blocks) for seed in range(sequences)])
    return np.asarray(np.argsort(drawn, axis=2).transpose(0, 2, 1))


def free_orders(blocks: int, sequences: int = 200, reversed_pairs: bool = False) -> Orders:
    """Drawn for each block alone; or reversed in every other block, as was done before."""
    generator = np.random.default_rng(11)
    orders = np.argsort(generator.random((sequences, 2, blocks)), axis=1)
    if reversed_pairs:
        orders[:, :, 1::2] = 1 - orders[:, :, 0::2][:, :, : blocks // 2]
    return np.asarray(orders)


def logs_of_starts(noise: StartNoise, gain: float, count: int, orders: Orders, seed: int) -> Floats:
    """Pairs of a baseline and an arm that is truly faster by ``gain``: a row a comparison."""
    generator = np.random.default_rng(seed)
    drawn = orders[generator.integers(0, len(orders), count)]
    errors = noise(generator, drawn + 2 * np.arange(orders.shape[2]))
    return np.asarray(np.log1p(gain) + errors[:, 0] - errors[:, 1])


# -----------------------------------------------------------------------------
# Inside one start, between whose steps a job is switched.

StepNoise = Callable[[np.random.Generator, tuple[int, int]], Floats]
"""From a generator and (comparisons, steps) to the errors of steps in a row."""


def independent(sd: float) -> StepNoise:
    """Steps that vary on their own."""
    return lambda generator, shape: sd * generator.standard_normal(shape)


def in_a_row(sd: float, together: float) -> StepNoise:
    """Steps of which neighbours go together: a first-order autoregression; and 1% a step."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        fresh = generator.standard_normal(shape)
        fresh[:, 1:] *= np.sqrt(1 - together**2)
        for step in range(1, shape[1]):
            fresh[:, step] += together * fresh[:, step - 1]
        return np.asarray(sd * fresh + 0.01 * generator.standard_normal(shape))

    return draw


def steps_periodic(size: float, period: float) -> StepNoise:
    """Load with a period of so many steps; and 2% a step."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        phase = 2 * np.pi * generator.random((shape[0], 1))
        load = size * np.sin(2 * np.pi * np.arange(shape[1]) / period + phase)
        return np.asarray(load + 0.02 * generator.standard_normal(shape))

    return draw


def steps_drift(size: float) -> StepNoise:
    """Steps get slower by ``size`` over the comparison; and 2% a step."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        return np.linspace(0, size, shape[1]) + 0.02 * generator.standard_normal(shape)

    return draw


def steps_slow(share: float, times: float) -> StepNoise:
    """Some steps are slower by a factor; and 2% a step."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        slow = generator.random(shape) < share
        return np.asarray(slow * np.log(times) + 0.02 * generator.standard_normal(shape))

    return draw


def every(period: int, times: float) -> StepNoise:
    """One step in each period is slower by a factor; and 2% a step."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        begin = generator.integers(0, period, (shape[0], 1))
        slow = (np.arange(shape[1]) + begin) % period == 0
        return np.asarray(slow * np.log(times) + 0.02 * generator.standard_normal(shape))

    return draw


STEPS: dict[str, StepNoise] = {
    "steps vary by 2%": independent(0.02),
    "steps vary by 5%": independent(0.05),
    "neighbours go together (0.8, 5%)": in_a_row(0.05, 0.8),
    "neighbours go together (0.95, 5%)": in_a_row(0.05, 0.95),
    "load of 5%, period 40 steps": steps_periodic(0.05, 40),
    "load of 5%, period 20 steps": steps_periodic(0.05, 20),
    "drift of 10%": steps_drift(0.10),
    "slow steps (1%, twofold)": steps_slow(0.01, 2.0),
    "slow steps (every 50th, threefold)": every(50, 3.0),
}


def blocks_of_steps(
    noise: StepNoise, gain: float, count: int, steps: int, orders: Orders, seed: int
) -> tuple[Floats, Floats]:
    """Seconds of the steps of both arms: (comparison, pair of blocks, step) each.

    Args:
        noise: of steps in a row.
        gain: by which the other arm is truly faster.
        count: number of comparisons.
        steps: in a block.
        orders: of the two blocks of each pair.
        seed: of the noise.

    """
    generator = np.random.default_rng(seed)
    pairs = orders.shape[2]
    errors = noise(generator, (count, 2 * pairs * steps))
    seconds = np.exp(errors).reshape(count, pairs, 2, steps)
    place = orders[generator.integers(0, len(orders), count)].transpose(0, 2, 1)[..., None]
    arms = np.take_along_axis(seconds, place, axis=2)
    return arms[:, :, 0], arms[:, :, 1] / (1 + gain)


def block_scores(seconds: Floats) -> Floats:
    """Log of the mean step of each block, its longest step taken as long as the second longest."""
    ordered = np.sort(seconds, axis=-1)
    ordered[..., -1] = ordered[..., -2]
    return np.asarray(np.log(ordered.mean(axis=-1)))
