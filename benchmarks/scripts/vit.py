"""Training of a ViT-B under bfloat16 autocast; random images stand in for the data.

python vit.py --steps 100
python vit.py --steps 100 --compile default --optimizer fused
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    import timm
except ImportError:
    raise SystemExit("vit.py needs timm: pip install timm") from None


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
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=1281167)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--compile-blocks", action="store_true", help="compile each block instead")
    parser.add_argument("--attention", choices=("flash", "efficient", "cudnn", "math"))
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--cudnn-benchmark", action="store_true")
    parser.add_argument("--bf16-weights", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if args.attention:
        torch.backends.cuda.enable_flash_sdp(args.attention == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(args.attention == "efficient")
        torch.backends.cuda.enable_cudnn_sdp(args.attention == "cudnn")

    loader = DataLoader(
        Images(args.images, args.image_size, args.classes), args.batch_size, shuffle=True,
        num_workers=args.workers, pin_memory=device.type == "cuda", drop_last=True,
    )  # fmt: skip
    model = timm.create_model(args.model, num_classes=args.classes, img_size=args.image_size)
    model = model.to(device, dtype=torch.bfloat16 if args.bf16_weights else torch.float32)
    if args.compile and args.compile_blocks:
        for block in model.blocks:
            block.compile(mode=args.compile)
    elif args.compile:
        model = torch.compile(model, mode=args.compile)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05, **walk)

    model.train()
    step, half, begin = 0, args.steps // 2, 0.0
    while step < args.steps:
        for images, labels in loader:
            if step == half:
                synchronize(device)
                begin = time.perf_counter()
            images = images.to(device, non_blocking=True).float().div_(127.5).sub_(1)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
