"""A DCGAN with an optimizer for each of its two networks; random images stand in for the data.

python dcgan.py --steps 200
python dcgan.py --steps 200 --channels-last --cudnn-benchmark --optimizer fused
"""

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count, kept=8192):
        self.images = torch.randint(256, (min(count, kept), 3, 64, 64), dtype=torch.uint8)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.images[index % len(self.images)]


def up(inside, outside, *shape):
    convolution = nn.ConvTranspose2d(inside, outside, *shape, bias=False)
    return [convolution, nn.BatchNorm2d(outside), nn.ReLU(True)]


def down(inside, outside):
    convolution = nn.Conv2d(inside, outside, 4, 2, 1, bias=False)
    return [convolution, nn.BatchNorm2d(outside), nn.LeakyReLU(0.2, inplace=True)]


def generator(noise, width):
    return nn.Sequential(
        *up(noise, 8 * width, 4, 1, 0), *up(8 * width, 4 * width, 4, 2, 1),
        *up(4 * width, 2 * width, 4, 2, 1), *up(2 * width, width, 4, 2, 1),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        *down(width, 2 * width), *down(2 * width, 4 * width), *down(4 * width, 8 * width),
        nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0),
    )  # fmt: skip


def initialise(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--noise", type=int, default=100)
    parser.add_argument("--images", type=int, default=200000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(999)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = torch.autocast(device.type, torch.bfloat16)
    autocast = bf16 if args.bf16 else contextlib.nullcontext()
    if args.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True

    loader = DataLoader(
        Images(args.images), args.batch_size, shuffle=True, num_workers=args.workers,
        drop_last=True,
    )  # fmt: skip
    networks = [generator(args.noise, args.width), discriminator(args.width)]
    networks = [net.apply(initialise).to(device) for net in networks]
    if args.channels_last:
        networks = [net.to(memory_format=torch.channels_last) for net in networks]
    if args.compile:
        networks = [torch.compile(net, mode=args.compile) for net in networks]
    net_g, net_d = networks
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer_d = torch.optim.Adam(net_d.parameters(), args.lr, betas=(0.5, 0.999), **walk)
    optimizer_g = torch.optim.Adam(net_g.parameters(), args.lr, betas=(0.5, 0.999), **walk)
    criterion = nn.BCEWithLogitsLoss()
    real_label = torch.ones(args.batch_size, device=device)
    fake_label = torch.zeros(args.batch_size, device=device)

    step, half, begin = 0, args.steps // 2, 0.0
    while step < args.steps:
        for images in loader:
            if step == half:
                synchronize(device)
                begin = time.perf_counter()
            real = images.to(device).float().div_(127.5).sub_(1)
            if args.channels_last:
                real = real.to(memory_format=torch.channels_last)
            noise = torch.randn(args.batch_size, args.noise, 1, 1, device=device)
            with autocast:
                fake = net_g(noise)
                loss_d = criterion(net_d(real), real_label)
                loss_d = loss_d + criterion(net_d(fake.detach()), fake_label)
            net_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            with autocast:
                loss_g = criterion(net_d(fake), real_label)
            net_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            step += 1
            if step % 50 == 0:
                losses = f"discriminator {loss_d.item():.4f}, generator {loss_g.item():.4f}"
                print(f"step {step}: {losses}", flush=True)
            if step == args.steps:
                synchronize(device)
                seconds = time.perf_counter() - begin
                break
    rate = (args.steps - half) * args.batch_size / seconds
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
