"""Measures the machine (transfers, the optimizer's step) and the parts of operators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.soap.executor.kernels import PartContext, prepare
from perfsearch.soap.executor.passes import is_plain_descent
from perfsearch.soap.graph import Operator, Rectangle
from perfsearch.soap.parts import TABLES, shares_statistics
from perfsearch.soap.rules.base import input_rectangle, parameter_rectangles, sizes
from perfsearch.soap.simulator.machine import Curve, Machine, Shard, ShardCost

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
"""Bytes at which a GPU's transfers are timed."""
SIZES_ON_CPU = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
_REPEATS = 10
_CPU_REPEATS = 5
_SLEEP_CYCLES = 20_000_000


def measure_machine(
    device: torch.device,
    name: str,
    memory_gib: float,
    optimizer: Callable[[Any], Any],
    devices_per_node: int,
) -> Machine:
    """Measure the default group's machine; called on all ranks, the first one's counts.

    Args:
        device: of this rank.
        name: of the devices.
        memory_gib: of one.
        optimizer: of the job.
        devices_per_node: ranks on each node.

    """
    world = dist.get_world_size()
    ranks = range(world)
    within, hosts = _transfers(device, ranks[:devices_per_node])
    across: dict[str, Curve] = {}
    if devices_per_node < world:
        # as evenly over the nodes as can be, so that each has its share of what crosses them
        spread = sorted(ranks, key=lambda rank: (rank % devices_per_node, rank))
        across, more = _transfers(device, spread)
        hosts += more
        within = within or across  # there is none inside a node of one device
    host_us, _ = _from_first((statistics.median(hosts) if hosts else 0.0, 0.0), device)
    copy_us, copy_us_per_mib = _from_first(_copies(device), device)
    machine = Machine(
        name=name,
        devices=world,
        devices_per_node=devices_per_node,
        memory_gib=memory_gib,
        within=within,
        across=across,
        copy_us=copy_us,
        copy_us_per_mib=copy_us_per_mib,
        can_replay=device.type == "cuda",
        sync_on_link=device.type == "cuda",  # NCCL is given one order over its communicators
        transfer_host_us=host_us,
        sync_host_us=host_us,
    )
    return with_optimizer(machine, device, optimizer)


def _transfers(device: torch.device, ranks: Sequence[int]) -> tuple[dict[str, Curve], list[float]]:
    """Transfers among the first two, three and so on of some ranks, and the host's times of each.

    Args:
        device: of this rank.
        ranks: the first rank of all is the first of them, whose times count.

    """
    curves: dict[str, Curve] = {kind: {} for kind in _TRANSFERS} if len(ranks) > 1 else {}
    hosts: list[float] = []
    for members in range(2, len(ranks) + 1):
        group = dist.new_group(sorted(ranks[:members]))
        inside = dist.get_rank() in ranks[:members]
        for kind, transfer in _TRANSFERS.items():
            peers = members - 1 if kind == "exchange" else members
            curve = curves[kind].setdefault(peers, {})
            for size in SIZES if device.type == "cuda" else SIZES_ON_CPU:
                reading = (0.0, 0.0)
                if inside:
                    reading = _timed(transfer(device, size, group, members), device, group)
                curve[size], host_us = _from_first(reading, device)
                hosts.append(host_us)
        if inside:
            dist.destroy_process_group(group)
    return curves, hosts


def with_optimizer(
    machine: Machine, device: torch.device, optimizer: Callable[[Any], Any]
) -> Machine:
    """The machine with the job's own optimizer, as this rank measures it.

    Args:
        machine: as measured, perhaps with another job.
        device: of this rank.
        optimizer: of the job.

    """
    fixed_us, us_per_mib, state, rows = _optimizer(optimizer, device)
    return replace(
        machine,
        optimizer_us=fixed_us,
        optimizer_us_per_mib=us_per_mib,
        state_per_weight=state,
        updates_rows=rows,
    )


def _from_first(pair: tuple[float, float], device: torch.device) -> tuple[float, float]:
    """The first rank's numbers, on every rank."""
    numbers = torch.tensor(pair, dtype=torch.float64, device=device)
    dist.broadcast(numbers, 0)
    first, second = numbers.tolist()
    return first, second


def _timed(move: Callable[[], object], device: torch.device, group: Any) -> tuple[float, float]:
    """Microseconds of a transfer on the device, and on the host."""
    for _ in range(2):
        move()
    if device.type != "cuda":
        readings = []
        for _ in range(_CPU_REPEATS):
            dist.barrier(group)
            since = time.perf_counter()
            move()
            readings.append((time.perf_counter() - since) * 1e6)
        return statistics.median(readings), 0.0
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group)
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    since = time.perf_counter()
    for _ in range(_REPEATS):
        move()
    host_s = time.perf_counter() - since
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e3 / _REPEATS, host_s * 1e6 / _REPEATS


def _filled(device: torch.device, size: int) -> torch.Tensor:
    return torch.zeros(max(size // 4, 1), device=device)


def _exchange(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    own = dist.get_rank(group)
    each = max(size // 4 // (members - 1), 1)
    counts = [0 if other == own else each for other in range(members)]
    out, into = (torch.zeros(sum(counts), device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(into, out, counts, counts, group=group)


def _all_to_all(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    each = max(size // 4 // members, 1)
    out, into = (torch.zeros(each * members, device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(into, out, group=group)


def _all_gather(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    part = _filled(device, size // members)
    whole = torch.zeros(part.numel() * members, device=device)
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    part = _filled(device, size // members)
    whole = torch.zeros(part.numel() * members, device=device)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _broadcast(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    whole = _filled(device, size)
    return lambda: dist.broadcast(whole, 0, group=group)


def _all_reduce(device: Any, size: int, group: Any, members: int) -> Callable[[], object]:
    whole = _filled(device, size)
    return lambda: dist.all_reduce(whole, group=group)


_TRANSFERS: dict[str, Callable[[Any, int, Any, int], Callable[[], object]]] = {
    "exchange": _exchange,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
}


def _copies(device: torch.device) -> tuple[float, float]:
    """Microseconds of putting two pieces side by side, beside its traffic, and of a MiB."""
    sizes_mib = (0.0625, 64.0 if device.type == "cuda" else 4.0)
    times = []
    for size in sizes_mib:
        pieces = [torch.zeros(int(size * 2**20) // 8, device=device) for _ in range(2)]
        times.append(timed(partial(torch.cat, pieces), device)[0])
    per_mib = max(times[1] - times[0], 0.0) / (sizes_mib[1] - sizes_mib[0])
    return max(times[0] - per_mib * sizes_mib[0], 0.0), per_mib


def _optimizer(
    make: Callable[[Any], Any], device: torch.device
) -> tuple[float, float, float, bool]:
    """Microseconds of a step beside the weights' traffic, of a MiB, state for a byte, and whether
    rows of tables are updated by themselves.
    """
    times, sizes_mib, state = [], (1.0, 64.0 if device.type == "cuda" else 4.0), 0.0
    rows = False
    for size in sizes_mib:
        count = int(size * 2**20) // 4 // 4
        weights = [nn.Parameter(torch.zeros(count, device=device)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = make(weights)
        rows = is_plain_descent(optimizer)
        optimizer.step()
        kept = sum(
            t.numel() * t.element_size()
            for entry in optimizer.state.values()
            for t in entry.values()
            if isinstance(t, torch.Tensor)
        )
        state = kept / sum(w.numel() * w.element_size() for w in weights)
        times.append(timed(optimizer.step, device)[0])
    per_mib = max(times[1] - times[0], 0.0) / (sizes_mib[1] - sizes_mib[0])
    return max(times[0] - per_mib * sizes_mib[0], 0.0), per_mib, state, rows


# -----------------------------------------------------------------------------
# Parts of operators, on the device that they will run on.

_PART_SLEEP_CYCLES = 10_000_000
"""GPU cycles, several milliseconds, in which the host launches what is timed."""
_CPU_SECONDS = 0.01
_PART_CPU_REPEATS = (3, 30)


def measure_part(shard: Shard, dtypes: dict[str, str], device: torch.device) -> ShardCost:
    """Time forward and backward of a part.

    Args:
        shard: which.
        dtypes: of operators' outputs, by name.
        device: to run on.

    """
    operator, part = shard.operator, shard.part
    context = PartContext(device)
    if shares_statistics(operator, part):
        # computed otherwise than alone; the time of the exchange itself is the machine's
        context = PartContext(device, reduce_channels=lambda partial: partial)
    function = prepare(operator, part, context)
    parameters = {
        p.name: _tensor(sizes(r), p.dtype, device).requires_grad_(p.trained)
        for p, r in zip(
            operator.parameters, parameter_rectangles(operator, part).values(), strict=True
        )
    }
    inputs = [
        _input(operator, part, index, dtypes[name], shard.gradients[index], device)
        for index, name in enumerate(operator.inputs)
    ]
    leaves = [t for t in (*inputs, *parameters.values()) if t is not None and t.requires_grad]
    forward_us, forward_host_us, spread = timed(lambda: function(inputs, parameters), device)
    value = function(inputs, parameters)
    if not leaves or not value.requires_grad:
        return ShardCost(forward_us, 0.0, forward_host_us, 0.0, spread=spread)
    above = torch.ones_like(value)

    def backward() -> None:
        torch.autograd.grad(value, leaves, above, retain_graph=True, allow_unused=True)

    backward_us, backward_host_us, _ = timed(backward, device)
    rows_us = 0.0
    if operator.kind in TABLES and inputs[0] is not None:
        rows_us = _rows(inputs[0], parameters["weight"], device)
    return ShardCost(forward_us, backward_us, forward_host_us, backward_host_us, rows_us, spread)


def _rows(indices: torch.Tensor, weight: torch.Tensor, device: torch.device) -> float:
    """Time of updating a table by the rows that were read."""
    flat, table = indices.reshape(-1), weight.detach()
    rows = torch.zeros(len(flat), *table.shape[1:], dtype=table.dtype, device=device)
    return timed(lambda: table.index_add_(0, flat, rows, alpha=-1.0), device)[0]


class Timed(NamedTuple):
    """Repeated measurements of a call.

    Attributes:
        device_us: on the device, the median.
        host_us: on the host, the median; 0 on a CPU, where the two are one.
        spread: of the readings on the device, between their quartiles, over the median.

    """

    device_us: float
    host_us: float
    spread: float


def timed(function: Callable[[], object], device: torch.device) -> Timed:
    """Time a call.

    A GPU is kept busy first, so that the host's launches do not show in its time.
    """
    if device.type != "cuda":
        return _timed_on_cpu(function)
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    readings = []
    for _ in range(3):
        torch.cuda._sleep(_PART_SLEEP_CYCLES)
        begin.record()
        since = time.perf_counter()
        for _ in range(_REPEATS):
            function()
        host_s = time.perf_counter() - since
        end.record()
        torch.cuda.synchronize(device)
        readings.append((begin.elapsed_time(end) * 1e3 / _REPEATS, host_s * 1e6 / _REPEATS))
    device_us, spread = median_and_spread([r[0] for r in readings])
    return Timed(device_us, statistics.median(r[1] for r in readings), spread)


def _timed_on_cpu(function: Callable[[], object]) -> Timed:
    function()
    readings: list[float] = []
    while len(readings) < _PART_CPU_REPEATS[0] or (
        sum(readings) < _CPU_SECONDS and len(readings) < _PART_CPU_REPEATS[1]
    ):
        since = time.perf_counter()
        function()
        readings.append(time.perf_counter() - since)
    median_s, spread = median_and_spread(readings)
    return Timed(median_s * 1e6, 0.0, spread)


def median_and_spread(readings: list[float]) -> tuple[float, float]:
    """The median, and the range between the quartiles as a share of it."""
    low, median, high = statistics.quantiles(readings, n=4, method="inclusive")
    return median, (high - low) / median if median > 0 else 0.0


def _input(
    operator: Operator,
    part: Rectangle,
    index: int,
    dtype: str,
    gradient: bool,
    device: torch.device,
) -> torch.Tensor | None:
    rectangle = input_rectangle(operator, index, part)
    if rectangle is None:
        return None
    shape = sizes(rectangle)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return _tensor(shape, dtype, device).requires_grad_(gradient)
    # Indices into a table are spread over it, as a batch's are; anything else is zero.
    tables = [p.shape[0] for p in operator.parameters if operator.kind.startswith("embedding")]
    generator = torch.Generator(device).manual_seed(0)
    high = min(tables, default=1)
    return torch.randint(0, high, shape, dtype=torch.int64, device=device, generator=generator).to(
        kind
    )


def _tensor(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(shape, dtype=torch.float32, device=device, generator=generator).to(kind)
