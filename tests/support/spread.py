"""A search of an unchanged DDP script over two nodes, as tests of every launcher run it."""

import json
import sys

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(8192, 8), torch.randn(8192, 1))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def command(directory, *options, keys=()):
    """Write the script and return the words that search it, with the run in ``run``."""
    (directory / "train.py").write_text(SCRIPT)
    keys = ["budget.trials=1", "confirm.finalists=0", "objective.min_gain=0", *keys]
    keys += ["strategy=random", "run_dir=run", "tracking.enabled=false", "sentinel_every=0"]
    keys += [f"runner.knobs.{name}=null" for name in ("dataloader_workers", "omp_num_threads")]
    words = [sys.executable, "-P", "-m", "perfsearch.cli.run", "--search"]
    words += ["--nnodes=2", "--nproc-per-node=1", *options]
    return [*words, *(word for key in keys for word in ("-o", key)), "train.py"]


def finished(directory):
    """What its journal has of trials that have ended."""
    lines = [json.loads(line) for line in (directory / "run" / "journal.jsonl").open()]
    return [line["trial"] for line in lines if line.get("event") == "finished"]


def worlds(trials):
    """In how many ranks they were measured."""
    return {one["measurement"]["world_size"] for one in trials if one["measurement"]}


NODES = {"node_0", "node_1"}


def sampled(trial):
    """Nodes of which a trial has system metrics."""
    readings = [key.split("/") for key in trial["measurement"]["system"] if "/" in key]
    return {node for node, name in readings if name == "cpu_utilization_percentage"}
