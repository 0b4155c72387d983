"""Two models of Jia et al. 2019 on 4 to 64 devices, in the simulator: found beside expert plans.

    python benchmarks/soap_paper.py [--devices 4 8 16 32 64] [--proposals 100000] [--models ...]

AlexNet, 256 samples a device, and a recurrent language model (two LSTM layers of 2048, unrolled ten
times, 10,000 words), 64 samples a device, as the paper has them but for fewer steps of the latter.
Models are captured as a search captures them. Devices are about the paper's: P100s, four a node on
NVLink (20 GB/s), nodes on EDR InfiniBand (100 Gb/s, shared by the four). Times of parts are
arithmetic: operations at 8 TFLOP/s or traffic at 500 GB/s, whichever takes longer, and 8 us; plans
are compared by one account, not machines. Nothing is run, and other work on the machine does not
matter. Needs the extra ``soap`` (numba).

Expert plans are the paper's: for AlexNet convolutions over samples and fully connected layers by
their outputs (Krizhevsky 2014); for the language model each layer on a device of each node, nodes
sharing the samples (Wu et al. 2016). Data parallelism is a third.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _soap_graphs import cost_of
from torch import nn
from torch.nn import functional

from perfsearch.core.hints import ChainRequest
from perfsearch.runners.soap.chains import run_chains
from perfsearch.soap.capture.capture import capture
from perfsearch.soap.graph import Graph, Role
from perfsearch.soap.named import OWN_BEST, named_plans
from perfsearch.soap.plan import OperatorConfiguration, Plan, data_parallel
from perfsearch.soap.simulator.machine import Machine, uniform
from perfsearch.soap.simulator.simulator import Simulator

NODE = 4
FLOPS_PER_US, BYTES_PER_US = 8e6, 5e5
costs = partial(cost_of, flops_per_us=FLOPS_PER_US, bytes_per_us=BYTES_PER_US)
STEPS, WIDTH, WORDS = 10, 2048, 10_000


def alexnet() -> nn.Module:
    """Krizhevsky's second, of one tower."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


class Cell(nn.Module):
    """One layer of an LSTM, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (batch, width) each; the new hidden state and cell."""
        i, f, g, o = (self.read(x) + self.keep(hidden)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class Rnnlm(nn.Module):
    """Embedding, two layers, and the words' scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(2))
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, steps) to (batch, steps, words)."""
        values = list(self.words(tokens).unbind(1))
        for cell in self.cells:
            hidden = torch.zeros_like(values[0])
            kept = torch.zeros_like(values[0])
            for step in range(STEPS):
                hidden, kept = cell(values[step], hidden, kept)
                values[step] = hidden
        return self.scores(torch.stack(values, 1))


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def word_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, following = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def _alexnet_graph(devices: int) -> Graph:
    batch = 256 * devices
    images = torch.zeros(1, 3, 224, 224).expand(batch, -1, -1, -1)
    labels = torch.zeros(1, dtype=torch.long).expand(batch)
    return capture(alexnet(), image_loss, (images, labels)).graph


def _rnnlm_graph(devices: int) -> Graph:
    tokens = torch.zeros(64 * devices, STEPS, dtype=torch.long)
    return capture(Rnnlm(), word_loss, (tokens, tokens)).graph


def one_weird_trick(graph: Graph, devices: int) -> Plan:
    """Convolutions over samples, fully connected layers by their outputs."""
    plan = data_parallel(graph, range(devices))
    for operator in graph.planned:
        wide = operator.kind == "linear" and operator.roles[-1] is Role.PARAMETER
        if wide and operator.shape[-1] >= devices:
            degrees = (*[1] * (len(operator.shape) - 1), devices)
            plan[operator.name] = OperatorConfiguration(degrees, tuple(range(devices)))
    return plan


def layer_a_device(graph: Graph, devices: int) -> Plan:
    """Words, each layer and the scores on one device of each node; nodes share the samples."""
    nodes = max(devices // NODE, 1)
    plan, place = {}, 0
    for operator in graph.planned:
        layer = re.search(r"cells\.(\d)", operator.name)
        if operator.name.startswith("words"):
            place = 0
        elif layer is not None:
            place = 1 + int(layer.group(1))
        elif operator.name.startswith("scores") or "loss" in operator.kind:
            place = NODE - 1
        degrees = [1] * len(operator.shape)
        if Role.SAMPLE in operator.roles:
            degrees[operator.roles.index(Role.SAMPLE)] = nodes
        ids = tuple(node * NODE + place for node in range(math.prod(degrees)))
        plan[operator.name] = OperatorConfiguration(tuple(degrees), ids)
    return plan


MODELS: dict[str, tuple[Callable[[int], Graph], Callable[[Graph, int], Plan]]] = {
    "alexnet": (_alexnet_graph, one_weird_trick),
    "rnnlm": (_rnnlm_graph, layer_a_device),
}


def machine_of(devices: int) -> Machine:
    """Four to a node."""
    near = uniform(devices, latency_us=10, gib_per_s=18, memory_gib=16, optimizer_us_per_mib=6.0)
    far = uniform(devices, latency_us=20, gib_per_s=11 / NODE, memory_gib=16)
    return replace(near, devices_per_node=min(NODE, devices), across=far.within)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--proposals", type=int, default=100_000)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    print("| model | devices | data parallel, ms | expert, ms | best named, ms | found, ms | "
          "over data parallel | over expert |")  # fmt: skip
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |", flush=True)
    for model in arguments.models:
        make, expert_of = MODELS[model]
        for devices in arguments.devices:
            graph = make(devices)
            named = named_plans(graph, devices)
            expert = expert_of(graph, devices)
            extra = (*named.values(), expert)
            simulator = Simulator(graph, machine_of(devices), costs, extra=extra)
            named = {**named, OWN_BEST: simulator.problem.own_best(), "expert": expert}
            times = {name: 1e3 * simulator.estimate(plan).seconds for name, plan in named.items()}
            fitting = [name for name in named if simulator.estimate(named[name]).fits]
            best = min(fitting, key=lambda name: times[name])
            request = ChainRequest({}, arguments.proposals, 0)
            searched = run_chains(simulator, named["data parallel"], named, request)
            found = 1e3 * searched.found.plans[0][0]
            print(
                f"| {model} | {devices} | {times['data parallel']:.4g} | {times['expert']:.4g} | "
                f"{times[best]:.4g} ({best}) | {found:.4g} "
                f"| {times['data parallel'] / found - 1:+.0%} "
                f"| {times['expert'] / found - 1:+.0%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
