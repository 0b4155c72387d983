"""A user's training: two ranks, loader workers, files that it appends to, replaces, removes."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Data(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.0003)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randn(1, generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    data = Data()
    loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=options.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        with open("log.txt", "a") as log:
            log.write("begins\n")
        Path("state.json").write_text(json.dumps({"pid": os.getpid()}))
        Path("old.txt").unlink(missing_ok=True)
        os.makedirs("checkpoints", exist_ok=True)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            with open("log.txt", "a") as log:
                log.write(f"{step} {loss.item()}\n")
            torch.save(model.state_dict(), "checkpoints/last.pt")
        if step >= options.steps:
            break
    dist.destroy_process_group()


main()
