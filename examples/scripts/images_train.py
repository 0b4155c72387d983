"""Image training from files, where loading is often what holds it back.

    torchrun --nproc-per-node 2 examples/scripts/images_train.py --data /path/to/images
    perfsearch-run --search --nproc-per-node 2 examples/scripts/images_train.py --epochs 1000

DATA holds a folder of ``.pt`` or ``.npy`` images (3 x H x W, unsigned bytes) for each class. Where
there is none, a small one is made.
"""

# ruff: noqa: D101, D102, D103

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ImageFolder(Dataset):
    def __init__(self, root, size):
        classes = sorted(path for path in Path(root).iterdir() if path.is_dir())
        self.files = [
            (file, label) for label, c in enumerate(classes) for file in sorted(c.iterdir())
        ]
        self.size = size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file, label = self.files[index]
        image = torch.from_numpy(np.load(file)).float().div_(255)
        image = nn.functional.interpolate(image[None], size=self.size, mode="bilinear")[0]
        return (image - image.mean()) / (image.std() + 1e-5), label


def make_images(root, classes=4, each=64, size=96):
    generator = np.random.default_rng(0)
    for label in range(classes):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            image = generator.integers(0, 256, (3, size, size), dtype=np.uint8)
            np.save(root / str(label) / f"{number}.npy", image)


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.body(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("images"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--size", type=int, default=64)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if dist.get_rank() == 0 and not args.data.exists():
        make_images(args.data)
    dist.barrier()

    torch.manual_seed(0)
    data = ImageFolder(args.data, args.size)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(
        data, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    model = nn.Sequential(
        Block(3, 16), Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 4),
    ).to(device)  # fmt: skip
    model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
