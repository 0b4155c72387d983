"""A script whose ranks and loader's workers change files in every way, before steps and after."""

import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    """Each sample is kept in a file of the cache, by whichever process loads it."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        Path("cache", str(index % 16)).write_text(str(index))
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def save(net, step):
    """As training scripts do, in both ranks."""
    torch.save({"step": step, "net": net.state_dict()}, "ckpt.pt")
    torch.save(net.state_dict(), f"draft{dist.get_rank()}.pt")
    os.replace(f"draft{dist.get_rank()}.pt", "best.pt")
    with open("train.log", "a") as log:
        log.write(f"{step}\n")
    if dist.get_rank() == 0:
        shutil.rmtree("runs")
        Path("runs/new").mkdir(parents=True)
        Path("runs/new/args.json").write_text("{}")
        if Path("old.pt").exists():
            Path("old.pt").unlink()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    assert not Path("snapshot.pt").exists(), "an earlier start's snapshot is here"
    os.makedirs("cache", exist_ok=True)
    net = torch.nn.Linear(16, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = 0
    while True:
        for inputs in DataLoader(Cached(), 8, num_workers=1):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(0.002)
            if step % 5 == 1:
                save(net, step)
                torch.save(step, "snapshot.pt")


if __name__ == "__main__":
    main()
