"""A DistributedDataParallel script as an expert writes it; it knows nothing of perfsearch.

    torchrun --nproc-per-node 4 benchmarks/_expert_ddp.py --steps 200

A causal transformer under bf16 autocast, fused AdamW, gradients as views of buckets, TF32 for what
stays float32, batches from two pinned worker processes that persist, copies that do not wait.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    def __init__(self, vocabulary, length):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (16384, length + 1), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, nn.functional.gelu, batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        embedded = self.tokens(tokens) + self.places.weight[:length]
        return self.head(self.body(embedded, mask, is_causal=True))


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--log-every", type=int, default=10)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")

    torch.manual_seed(0)
    data = Tokens(args.vocabulary, args.length)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(
        data, args.batch_size, sampler=sampler, drop_last=True, num_workers=2, pin_memory=on_gpu,
        persistent_workers=True,
    )  # fmt: skip
    model = Model(args.vocabulary, args.width, args.layers, args.length).to(device)
    model = DistributedDataParallel(
        model, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    begin = time.time()
    for step, tokens in zip(range(args.steps), batches(loader, sampler), strict=False):
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            scores = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.log_every == 0:
            told = loss.item()  # waits for the device
            if dist.get_rank() == 0:
                samples = args.log_every * args.batch_size * dist.get_world_size()
                rate = samples / (time.time() - begin)
                print(f"step {step + 1}: loss {told:.4f}, {rate:.0f} samples/s", flush=True)
            begin = time.time()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
