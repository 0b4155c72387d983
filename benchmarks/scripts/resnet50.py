"""ImageNet-style training of a ResNet-50 in float32; random images stand in for the data.

python resnet50.py --steps 200
python resnet50.py --steps 200 --channels-last --cudnn-benchmark --compile default
"""

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from torchvision import models
except ImportError:
    raise SystemExit("resnet50.py needs torchvision: pip install torchvision") from None

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Dataset):
    def __init__(self, count, size, classes, kept=512):
        self.images = torch.randint(256, (min(count, kept), 3, size, size), dtype=torch.uint8)
        self.labels = torch.randint(classes, (count,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index % len(self.images)], self.labels[index]


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=1281167)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = torch.autocast(device.type, torch.bfloat16)
    autocast = bf16 if args.bf16 else contextlib.nullcontext()
    if args.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if args.tf32:
        torch.set_float32_matmul_precision("high")

    loader = DataLoader(
        Images(args.images, args.image_size, args.classes), args.batch_size, shuffle=True,
        num_workers=args.workers, pin_memory=device.type == "cuda", drop_last=True,
    )  # fmt: skip
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=device).view(1, 3, 1, 1)
    model = models.__dict__[args.arch](num_classes=args.classes)
    model = model.to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if args.compile:
        model = torch.compile(model, mode=args.compile)
    criterion = nn.CrossEntropyLoss()
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, **walk
    )

    model.train()
    step, half, begin = 0, args.steps // 2, 0.0
    while step < args.steps:
        for images, labels in loader:
            if step == half:
                synchronize(device)
                begin = time.perf_counter()
            images = images.to(device, non_blocking=True).float().div_(255)
            images = (images - mean) / std
            if args.channels_last:
                images = images.to(memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with autocast:
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                synchronize(device)
                seconds = time.perf_counter() - begin
                break
    rate = (args.steps - half) * args.batch_size / seconds
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
