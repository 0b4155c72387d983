"""Fine-tuning of a Llama of 0.3 billion parameters in bfloat16, by a plain loop.

    python llama.py --steps 100
    python llama.py --steps 100 --micro-batch 16 --accumulate 1 --compile default --optimizer fused

The weights are random and so are the tokens; nothing is downloaded.
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig


class Sequences(Dataset):
    def __init__(self, count, length, vocabulary):
        self.tokens = torch.randint(vocabulary, (count, length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pin-memory", action="store_true")
    parser.add_argument("--compile", metavar="MODE", help="default, max-autotune, reduce-overhead")
    parser.add_argument("--compile-blocks", action="store_true", help="compile each layer instead")
    parser.add_argument("--attention", choices=("flash", "efficient", "cudnn", "math"))
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default")
    args = parser.parse_args()

    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.attention:
        torch.backends.cuda.enable_flash_sdp(args.attention == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(args.attention == "efficient")
        torch.backends.cuda.enable_cudnn_sdp(args.attention == "cudnn")

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    model.train()
    if args.compile and args.compile_blocks:
        for layer in model.model.layers:
            layer.compile(mode=args.compile)
    elif args.compile:
        model = torch.compile(model, mode=args.compile)
    walk = {} if args.optimizer == "default" else {args.optimizer: True}
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, **walk)
    loader = DataLoader(
        Sequences(args.sequences, args.length, args.vocabulary), args.micro_batch, shuffle=True,
        drop_last=True, num_workers=args.workers, pin_memory=args.pin_memory,
    )  # fmt: skip

    step, taken, half, begin = 0, 0, args.steps // 2, 0.0
    while step < args.steps:
        for tokens in loader:
            if step == half and taken % args.accumulate == 0:
                synchronize(device)
                begin = time.perf_counter()
            tokens = tokens.to(device, non_blocking=True)
            loss = model(input_ids=tokens, labels=tokens).loss / args.accumulate
            loss.backward()
            taken += 1
            if taken % args.accumulate:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item() * args.accumulate:.4f}", flush=True)
            if step == args.steps:
                synchronize(device)
                seconds = time.perf_counter() - begin
                break
    samples = (args.steps - half) * args.micro_batch * args.accumulate
    rate = samples / seconds
    print(f"throughput: {rate:.2f} samples/s over the last {args.steps - half} steps")


if __name__ == "__main__":
    main()
