"""DLRM with whole tables on devices, written by hand: ``torchrun --nproc N _soap_hand.py``.

Each rank has its share of the tables and all of the rest, as DistributedDataParallel; indices of
the whole batch are known everywhere, and the batch lies on the device. The last line is a JSON
object with the milliseconds of each step.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import _soap_jobs as jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 1024
WARM_UP, STEPS = 20, 100


class Swap(torch.autograd.Function):
    """All-to-all there and back."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A part to each."""
        out = torch.empty_like(tensor)
        dist.all_to_all_single(out, tensor)
        return out

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """And back."""
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


class Rest(nn.Module):
    """All but the tables."""

    def __init__(self, model: jobs.Dlrm) -> None:
        super().__init__()
        self.bottom, self.top = model.bottom, model.top

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Take what the tables gave."""
        return self.top(torch.cat([self.bottom(dense), vectors], 1))


def main() -> None:
    gpu = torch.cuda.is_available()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    job = jobs.dlrm()
    model, each, share = job.model, 8 // world, BATCH // world
    tables = nn.ModuleList(model.tables[rank * each : (rank + 1) * each]).to(device)
    rest = DistributedDataParallel(Rest(model).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD([*tables.parameters(), *rest.parameters()], lr=0.01)
    dense, rows, wanted = (t[:BATCH].to(device) for t in job.data.tensors)
    own = slice(rank * share, (rank + 1) * share)

    def step() -> None:
        found = [t(rows[:, rank * each + i]) for i, t in enumerate(tables)]
        vectors = Swap.apply(torch.stack(found, 1).view(world, share, each * 64).contiguous())
        whole = vectors.permute(1, 0, 2).reshape(share, -1)
        functional.mse_loss(rest(dense[own], whole), wanted[own]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(STEPS // 10):
        dist.barrier()
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            step()
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 100)
    if rank == 0:
        print(json.dumps({"step_ms": times}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
