"""GPT training in a loop of its own, on random crops of one long array of tokens.

python gpt.py --steps 200
python gpt.py --steps 200 --micro-batch 32 --accumulate 1 --compile default --optimizer fused
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, block, width, layers, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init)
        self.head.weight = self.tokens.weight

    def _init(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--block", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--compile-blocks", action="store_true", help="compile each block instead")
    parser.add_argument("--attention", choices=("flash", "efficient", "cudnn", "math"))
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--bf16-weights", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1337)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.attention:
        torch.backends.cuda.enable_flash_sdp(args.attention == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(args.attention == "efficient")
        torch.backends.cuda.enable_cudnn_sdp(args.attention == "cudnn")

    data = torch.randint(args.vocabulary, (args.tokens,))

    def batch():
        starts = torch.randint(len(data) - args.block - 1, (args.micro_batch,)).tolist()
        rows = torch.stack([data[i : i + args.block + 1] for i in starts])
        if device.type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]

    model = GPT(args.vocabulary, args.block, args.width, args.layers, args.heads).to(device)
    if args.bf16_weights:
        model = model.bfloat16()
    if args.compile and args.compile_blocks:
        for block in model.blocks:
            block.compile(mode=args.compile)
    elif args.compile:
        model = torch.compile(model, mode=args.compile)
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, **walk
    )

    half, begin = args.steps // 2, 0.0
    for step in range(args.steps):
        if step == half:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        for _ in range(args.accumulate):
            tokens, targets = batch()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, targets) / args.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item() * args.accumulate:.4f}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    samples = (args.steps - half) * args.micro_batch * args.accumulate
    rate = samples / (time.perf_counter() - begin)
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
