"""Times transfers between the devices of a process group, and the optimizer's step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.parallel.soap.machine import Curve, Machine
from perfsearch.parallel.soap.measure_costs import timed
from perfsearch.parallel.soap.row_updates import is_plain_descent

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
"""Bytes at which a GPU's transfers are timed."""
SIZES_ON_CPU = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
_REPEATS = 10
_CPU_REPEATS = 5
_SLEEP_CYCLES = 20_000_000


def measure(
    device: torch.device, name: str, memory_gib: float, optimizer: Callable[[Any], Any]
) -> Machine:
    """Measure the default group's machine; called on all ranks, the first one's counts.

    Args:
        device: of this rank.
        name: of the devices.
        memory_gib: of one.
        optimizer: of the job.

    """
    world = dist.get_world_size()
    within: dict[str, Curve] = {kind: {} for kind in _TRANSFERS} if world > 1 else {}
    hosts: list[float] = []
    for members in range(2, world + 1):
        group = dist.new_group(list(range(members)))
        inside = dist.get_rank() < members
        for kind, transfer in _TRANSFERS.items():
            peers = members - 1 if kind == "exchange" else members
            curve = within[kind].setdefault(peers, {})
            for size in SIZES if device.type == "cuda" else SIZES_ON_CPU:
                reading = (0.0, 0.0)
                if inside:
                    reading = _timed(transfer(device, size, group, members), device, group)
                curve[size], host_us = _from_first(reading, device)
                hosts.append(host_us)
        if inside:
            dist.destroy_process_group(group)
    host_us, _ = _from_first((statistics.median(hosts) if hosts else 0.0, 0.0), device)
    copy_us, copy_us_per_mib = _from_first(_copies(device), device)
    machine = Machine(
        name=name,
        devices=world,
        devices_per_node=world,
        memory_gib=memory_gib,
        within=within,
        copy_us=copy_us,
        copy_us_per_mib=copy_us_per_mib,
        can_replay=device.type == "cuda",
        sync_on_link=device.type == "cuda",  # NCCL is given one order over its communicators
        transfer_host_us=host_us,
        sync_host_us=host_us,
    )
    return with_optimizer(machine, device, optimizer)


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
