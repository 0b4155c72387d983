"""Describes a job to the planner: captures its operators, times their parts and transfers.

A recipe like the others, so that it runs in the ranks that then measure the plans: it leaves its
files in the directory of its options while it is built, and its step does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perfsearch.core.hardware import torch_version
from perfsearch.core.knob import Value
from perfsearch.soap.formats import COSTS, GRAPH, MACHINE
from perfsearch.soap.graph import Graph, Role, dump_graph
from perfsearch.soap.measure import measure_machine, measure_part, with_optimizer
from perfsearch.soap.recipe import captured_of
from perfsearch.soap.simulator.machine import CostTable, Machine, shards_of
from perfsearch.training.base import BuildContext, LoaderOptions, Mark, NextBatch, TrainStep
from perfsearch.workloads.base import Job


class ProfileStep(TrainStep):
    """Has left its files already; takes batches and trains nothing."""

    def __init__(self, job: Job, samples: int, device: torch.device) -> None:
        self.job = job
        self.loader = LoaderOptions(micro_batch=samples)
        self._device = device

    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Take a batch."""
        next_batch()
        for phase in ("forward", "backward", "optimizer"):
            mark(phase)
        return torch.zeros((), device=self._device)

    def in_force(self) -> dict[str, Value]:
        """Nothing is."""
        return {}


def build(context: BuildContext) -> ProfileStep:
    """Capture and measure what the options ask for, and leave it in their directory."""
    options, device = context.options, context.device
    directory = Path(options["directory"])
    job = context.host_job()
    graph = captured_of(job, options["samples"], device).graph
    first = context.groups.rank == 0
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / GRAPH).write_text(dump_graph(graph))
    _machine(options, device, job, context.groups.spec.nproc, first)
    table = _costs(graph, options, device)
    if first:
        table.write(directory / COSTS)
    return ProfileStep(job, context.local_batch, device)


def _machine(
    options: Mapping[str, Any], device: torch.device, job: Job, per_node: int, first: bool
) -> None:
    """Leave the machine, whose transfers may be known, with the job's own optimizer."""
    path = Path(options["directory"]) / MACHINE
    if options["machine"] is None:
        machine = measure_machine(
            device, options["device_name"], options["memory_gib"], job.optimizer, per_node
        )
        if first:
            machine.write(path)
    elif first:
        known = Machine.read(Path(options["machine"]))
        with_optimizer(known, device, job.optimizer).write(path)


def _costs(graph: Graph, options: Any, device: torch.device) -> CostTable:
    """Costs that are not known yet; GPUs share the work, CPU ranks would disturb each other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    table = CostTable(options["device_name"], torch_version())
    known = set(options["known"])
    roles = frozenset(Role(name) for name in options["roles"])
    wanted = [s for s in shards_of(graph, options["devices"], roles) if s.key not in known]
    dtypes = {o.name: o.dtype for o in graph.operators}
    share = wanted[rank::world] if device.type == "cuda" else wanted if rank == 0 else []
    for shard in share:
        table.add(shard, measure_part(shard, dtypes, device))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, json.dumps(table.to_json()))
    for other in gathered:
        table.merge(CostTable.from_json(json.loads(other)))
    return table
