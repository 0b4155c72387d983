from itertools import cycle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfsearch.instrument.loaders import Loaders
from perfsearch.instrument.optimizers import Losses

TRAINING, VALIDATION = TensorDataset(torch.ones(40, 3)), TensorDataset(torch.ones(64, 3))


@pytest.fixture
def loaders():
    made = Loaders({})
    losses = Losses(begun=lambda roots: made.accounting.backward())
    yield made
    losses.undo()
    made.undo()


def train(*batches):
    weight = torch.ones(3, requires_grad=True)
    for (batch,) in batches:
        (batch * weight).sum().backward()


def endless(loader):
    while True:
        yield from loader


def one_ahead(batches):
    held = next(batches)
    for batch in batches:
        yield held
        held = batch


def run(loaders, steps, step, validate=lambda: None, every=3):
    """Train as many steps before the window as in it, and look at that."""
    for made in range(1, 2 * steps + 1):
        step()
        loaders.accounting.end_step()
        if made == steps:  # before what the script does between two steps
            loaders.accounting.begin()
        if made % every == 0 and made < 2 * steps:
            validate()
    return loaders.accounting.read()


def plainly():
    for _ in DataLoader(VALIDATION, 32):
        pass


def without_gradients():
    with torch.no_grad():
        plainly()


@pytest.mark.parametrize("validate", [plainly, without_gradients])
def test_batches_of_validation_are_no_samples_of_training(loaders, validate):
    batches = endless(DataLoader(TRAINING, 4))
    used = run(loaders, 6, lambda: train(next(batches)), validate)
    assert used.samples == 6 * 4
    assert used.aside == [0, 3]  # it lies between a step and the next


def test_tokens_of_validation_are_none_of_training(loaders):
    def text(size, length):
        return DataLoader(torch.ones(size, length, dtype=torch.int64), 4)

    batches = endless(text(40, 10))

    def step():
        next(batches)
        train((torch.ones(3),))

    used = run(loaders, 6, step, lambda: list(text(8, 100)))
    assert (used.samples, used.tokens, used.aside) == (24, 240, [0, 3])


def test_a_loader_that_is_kept_for_all_rounds_stays_one_of_validation(loaders):
    held = DataLoader(VALIDATION, 32, num_workers=1, persistent_workers=True)
    batches = endless(DataLoader(TRAINING, 4))
    used = run(loaders, 6, lambda: train(next(batches)), lambda: list(held))
    assert (used.samples, used.aside) == (24, [0, 3])
    loaders.close()


def test_an_endless_iterator_for_validation_is_not_trained_on(loaders):
    batches, held = endless(DataLoader(TRAINING, 4)), endless(DataLoader(VALIDATION, 32))

    def one_batch():
        with torch.no_grad():
            next(held)

    used = run(loaders, 6, lambda: train(next(batches)), one_batch, every=1)
    assert (used.samples, used.aside) == (24, [0, 1, 2, 3, 4, 5])


def test_where_every_batch_is_taken_without_gradients_the_one_that_goes_on_is_trained_on(loaders):
    batches = endless(DataLoader(TRAINING, 4))

    def step():
        with torch.no_grad():
            taken = next(batches)
        train(taken)

    used = run(loaders, 6, step, without_gradients)
    assert (used.samples, used.aside) == (24, [0, 3])


def test_batches_that_are_taken_in_advance_are_trained_on(loaders):
    batches = one_ahead(endless(DataLoader(TRAINING, 4)))
    used = run(loaders, 6, lambda: train(next(batches)), without_gradients)
    assert (used.samples, used.aside) == (24, [0, 3])


def test_all_batches_of_an_accumulated_step_are_trained_on(loaders):
    batches = endless(DataLoader(TRAINING, 4))
    used = run(loaders, 4, lambda: train(*[next(batches) for _ in range(3)]), plainly)
    assert (used.samples, used.aside) == (48, [2])


def test_both_loaders_of_a_step_are_trained_on(loaders):
    labelled, others = endless(DataLoader(TRAINING, 4)), endless(DataLoader(VALIDATION, 8))

    def step():
        next(others)
        train(next(labelled))

    used = run(loaders, 5, step)
    assert (used.samples, used.aside) == (60, [])


def test_a_loader_that_is_begun_anew_for_each_step_is_trained_on(loaders):
    used = run(loaders, 5, lambda: train(next(iter(DataLoader(TRAINING, 4)))))
    assert (used.samples, used.aside) == (20, [])


def test_where_nothing_is_known_every_batch_counts(loaders):
    batches = cycle([torch.ones(3)])
    used = run(loaders, 2, lambda: next(batches), plainly, every=2)
    assert (used.samples, used.aside) == (64, [])
