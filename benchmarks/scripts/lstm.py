"""A language model by an LSTM in float32, over one long array of tokens cut into columns.

python lstm.py --steps 200
python lstm.py --steps 200 --tf32 --optimizer fused
"""

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        output, hidden = self.lstm(self.dropout(self.tokens(tokens)), hidden)
        return self.head(self.dropout(output)), hidden


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--bptt", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=33278)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1111)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = torch.autocast(device.type, torch.bfloat16)
    autocast = bf16 if args.bf16 else contextlib.nullcontext()
    if args.tf32:
        torch.set_float32_matmul_precision("high")

    rows = args.tokens // args.batch_size
    data = torch.randint(args.vocabulary, (rows, args.batch_size)).to(device)
    model = Model(args.vocabulary, args.width, args.layers, args.dropout).to(device)
    if args.compile:
        model = torch.compile(model, mode=args.compile)
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.Adam(model.parameters(), args.lr, **walk)

    model.train()
    hidden, place, half, begin = None, 0, args.steps // 2, 0.0
    for step in range(args.steps):
        if step == half:
            synchronize(device)
            begin = time.perf_counter()
        if place + args.bptt + 1 > rows:
            hidden, place = None, 0
        tokens = data[place : place + args.bptt]
        targets = data[place + 1 : place + 1 + args.bptt]
        place += args.bptt
        if hidden is not None:
            hidden = tuple(state.detach() for state in hidden)
        with autocast:
            scores, hidden = model(tokens, hidden)
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    synchronize(device)
    rate = (args.steps - half) * args.batch_size / (time.perf_counter() - begin)
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
