"""Whether a script that is taken back trains the same steps again."""

import random

import pytest

from perfsearch.runners._script.start import _differ_by_chance

LOSSES = [10.4, 10.37, 10.34, 10.27, 10.22]


def trained(generator, noise=1e-4, drift=0.0):
    """The losses of the first time and of three repetitions, apart more from step to step."""
    return [
        [
            loss + place * (generator.gauss(0, noise) + drift * number)
            for place, loss in enumerate(LOSSES)
        ]
        for number in range(4)
    ]


def test_what_differs_by_chance_is_the_same_training() -> None:
    generator = random.Random(0)
    runs = [trained(generator) for _ in range(200)]
    assert sum(_differ_by_chance(first, again) for first, *again in runs) >= 180


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_what_goes_on_from_one_repetition_to_the_next_is_another_training(noise) -> None:
    """Though each repetition is as far from the one before it as the first is from the original."""
    generator = random.Random(0)
    runs = [trained(generator, noise, drift=1.5e-3) for _ in range(200)]
    assert not any(_differ_by_chance(first, again) for first, *again in runs)
