"""What each of several gloo ranks runs for ``test_formats_dtensor``."""

import os

import torch
import torch.distributed as dist
from support import ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

SAMPLES = 8


class Wrapped(nn.Module):
    """Returns its output among others, or its loss."""

    def __init__(self, model, reduces):
        super().__init__()
        self.model, self.reduces = model, reduces

    def forward(self, x):
        value = self.model(x)
        return {"out": [value.square().mean() if self.reduces else value], "none": None}


def make():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(12, 8), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.LayerNorm(8),
        nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4),
    ).double()  # fmt: skip
    batch = (torch.randint(12, (SAMPLES, 3)), torch.randn(SAMPLES, 4).double())
    return model, loss, batch


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def launch(directory, world, text):
    ranks.start(run, (str(directory), world, text), nprocs=world)
    return torch.load(f"{directory}/found.pt")


def wrapped(exported, reduces):
    """The same model inside another."""
    model = Wrapped(make()[0], reduces)
    inner = {f"model.{name}": layout for name, layout in exported["PLAN"].items()}
    usual = exported["PLAN"]
    exported["PLAN"] = inner
    exported["parallelize"](model, "cpu")
    exported["PLAN"] = usual
    return model


def run(rank, directory, world, text):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    model, loss, batch = make()
    expected = loss(model, batch)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model, _, _ = make()
    exported = {}
    exec(compile(text, "dtensor_plan.py", "exec"), exported)
    mesh = exported["parallelize"](model, "cpu")
    mine = DTensor.from_local(batch[0].chunk(world)[rank], mesh, [Shard(0)])
    value = loss(model, (mine, batch[1]))
    value.backward()
    errors = [abs(value - expected).item()]
    (again,) = wrapped(exported, False)(mine)["out"]
    errors.append(abs(functional.mse_loss(again, batch[1]) - expected).item())
    try:
        refused = str(wrapped(exported, True)(mine))
    except ValueError as error:
        refused = str(error)
    for name, parameter in model.named_parameters():
        errors.append((parameter.grad.full_tensor() - gradients[name]).abs().max().item())
    if rank == 0:
        placements = {n: str(p.placements[0]) for n, p in model.named_parameters()}
        torch.save((errors, placements, refused), f"{directory}/found.pt")
    dist.barrier()
    os._exit(0)  # threads of functional collectives over gloo abort a process that takes them down
