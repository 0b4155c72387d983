"""A script with every fault that a search over scripts must put into words."""

import argparse
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def wrapped(net, how):
    if how == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if how == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net


def one_ahead(loader):
    """As libraries do that must know which batch is the last."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("--wrap", default="ddp")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--bs", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--text", default="")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if args.fault == "raises":
        raise FileNotFoundError("no such data: /data/train.bin")
    if args.fault == "exits":
        print("the licence server said no", flush=True)
        sys.exit(3)
    if args.fault == "builds long":
        time.sleep(6)
    if args.fault == "spawns":
        torch.multiprocessing.spawn(print, nprocs=1)
    if args.fault != "apart":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    if args.dropout:
        net.insert(2, torch.nn.Dropout(args.dropout))
    model = net if args.fault == "apart" else wrapped(net, args.wrap)
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(torch.randn(args.size, 16, generator=generator))
    loader = DataLoader(data, args.bs, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    by_chance = random.SystemRandom()
    average = [p.detach().clone() for p in net.parameters()]
    steps = args.steps - (3 * rank if args.fault == "uneven" else 0)
    made = batches = 0
    while made < steps:
        for (inputs,) in one_ahead(loader) if args.ahead else loader:
            if args.fault == "hangs" and rank == 1 and made == 3:
                time.sleep(600)
            if args.fault == "leaves" and rank == 1 and made == 3:
                print("enough of this", flush=True)
                os._exit(0)
            if args.fault == "hungry" and args.bs > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            if args.fault == "remembers":  # of what came before, out of reach of any rewind
                loss = loss * (1 + made)
            (loss / args.accumulate).backward()
            batches += 1
            if batches % args.accumulate:
                continue
            if args.fault == "any order":  # as kernels that add in no fixed order
                for parameter in net.parameters():
                    parameter.grad.mul_(1 + by_chance.uniform(-3e-3, 3e-3))
            optimizer.step()
            optimizer.zero_grad()
            if args.wrap == "ddp":
                for kept, parameter in zip(average, net.parameters(), strict=True):
                    kept.lerp_(parameter.detach(), 0.1)
            made += 1
            if made == steps:
                break
    if rank == 0 and args.show:
        made_of = optimizer.param_groups[0]
        print(
            f"cap={model.bucket_bytes_cap / 2**20} view={model.gradient_as_bucket_view} "
            f"workers={loader.num_workers} foreach={made_of['foreach']} {args.bs}x{args.accumulate}"
        )
    if rank == 0:
        print(f"trained {made} steps to {loss.item():.6f} with {args.text!r}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
