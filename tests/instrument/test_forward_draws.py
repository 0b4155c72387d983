"""Whether a forward pass draws random numbers."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfsearch.instrument.loaders import Loaders
from perfsearch.instrument.optimizers import Losses


@pytest.fixture
def loaders():
    made = Loaders({})
    losses = Losses(begun=lambda roots: made.forward.end())
    yield made
    losses.undo()
    made.undo()


@pytest.mark.parametrize(("probability", "draws"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dropout_is_seen_and_a_loader_that_shuffles_is_none(loaders, probability, draws, shuffle):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(probability))
    net.train(probability > 0)
    data = TensorDataset(torch.randn(8, 4))
    assert loaders.forward.draws is None
    for _ in range(2):
        for (batch,) in DataLoader(data, batch_size=4, shuffle=shuffle):
            net(batch).sum().backward()
    assert loaders.forward.draws is draws


def test_what_is_drawn_after_the_backward_pass_is_not_the_forward_passs(loaders):
    net = torch.nn.Linear(4, 1)
    for (batch,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4):
        net(batch).sum().backward()
        torch.rand(3)
    assert loaders.forward.draws is False
