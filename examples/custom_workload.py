"""A training job of your own, to be tuned by perfsearch. Copy it, and put your parts in.

    perfsearch runner=ddp strategy=bayes workload=custom \
        workload.factory=examples.custom_workload:build workload.global_batch=64

``build`` runs once on every rank. It makes the parts of the job and starts nothing: no process
group, no wrapper, no loop. perfsearch forms the batches (the same in every trial, the global batch
as you set it), wraps the model, and runs the steps.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Curves(Dataset):
    """Your dataset: it has a length, and gives sample ``index``."""

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        phase = torch.linspace(0, 6.28, 128) + 0.01 * index
        return torch.sin(phase), torch.tensor(index % 4)


class Classifier(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
        )

    def forward(self, curves):
        """Map curves to a score for each of four classes."""
        return self.layers(curves)


def loss(model, batch):
    """Your loss: the mean over the batch, on tensors that are on the device already."""
    curves, labels = batch
    return F.cross_entropy(model(curves), labels)


def optimizer(parameters):
    """Your optimizer: made anew for every trial."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def build():
    """Return model, data, loss and optimizer.

    A ``perfsearch.workloads.base.Job`` in place of the tuple also takes a collate function, the
    tokens of a sample, an autocast dtype, and the blocks of the model.
    """
    return Classifier(), Curves(), loss, optimizer
