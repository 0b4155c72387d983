"""Times parts of operators on the device that they will run on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.costs import Shard, ShardCost
from perfsearch.parallel.soap.graph import Operator
from perfsearch.parallel.soap.kernels import Surroundings, prepare
from perfsearch.parallel.soap.layouts import TABLES
from perfsearch.parallel.soap.rules import input_rectangle, parameter_rectangles, sizes
from perfsearch.parallel.soap.shared_sums import shares_statistics

_REPEATS = 10
_SLEEP_CYCLES = 10_000_000
"""GPU cycles, several milliseconds, in which the host launches what is timed."""
_CPU_SECONDS = 0.01
_CPU_REPEATS = (3, 30)


def measure(shard: Shard, dtypes: dict[str, str], device: torch.device) -> ShardCost:
    """Time forward and backward of a part.

    Args:
        shard: which.
        dtypes: of operators' outputs, by name.
        device: to run on.

    """
    operator, part = shard.operator, shard.part
    surroundings = Surroundings(device)
    if shares_statistics(operator, part):
        # computed otherwise than alone; the time of the exchange itself is the machine's
        surroundings = Surroundings(device, sum_over_channels=lambda sums: sums)
    function = prepare(operator, part, surroundings)
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
    forward_us, forward_host_us = timed(lambda: function(inputs, parameters), device)
    value = function(inputs, parameters)
    if not leaves or not value.requires_grad:
        return ShardCost(forward_us, 0.0, forward_host_us, 0.0)
    above = torch.ones_like(value)

    def backward() -> None:
        torch.autograd.grad(value, leaves, above, retain_graph=True, allow_unused=True)

    backward_us, backward_host_us = timed(backward, device)
    rows_us = 0.0
    if operator.kind in TABLES and inputs[0] is not None:
        rows_us = _rows(inputs[0], parameters["weight"], device)
    return ShardCost(forward_us, backward_us, forward_host_us, backward_host_us, rows_us)


def _rows(indices: torch.Tensor, weight: torch.Tensor, device: torch.device) -> float:
    """Time of updating a table by the rows that were read."""
    flat, table = indices.reshape(-1), weight.detach()
    rows = torch.zeros(len(flat), *table.shape[1:], dtype=table.dtype, device=device)
    return timed(lambda: table.index_add_(0, flat, rows, alpha=-1.0), device)[0]


def timed(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Microseconds of a call on the device, and on the host; on a CPU they are one.

    A GPU is kept busy first, so that the host's launches do not show in its time.
    """
    if device.type != "cuda":
        return _timed_on_cpu(function), 0.0
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    readings = []
    for _ in range(3):
        torch.cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        since = time.perf_counter()
        for _ in range(_REPEATS):
            function()
        host_s = time.perf_counter() - since
        end.record()
        torch.cuda.synchronize(device)
        readings.append((begin.elapsed_time(end) * 1e3 / _REPEATS, host_s * 1e6 / _REPEATS))
    device_us = statistics.median(r[0] for r in readings)
    return device_us, statistics.median(r[1] for r in readings)


def _timed_on_cpu(function: Callable[[], object]) -> float:
    function()
    readings: list[float] = []
    while len(readings) < _CPU_REPEATS[0] or (
        sum(readings) < _CPU_SECONDS and len(readings) < _CPU_REPEATS[1]
    ):
        since = time.perf_counter()
        function()
        readings.append(time.perf_counter() - since)
    return statistics.median(readings) * 1e6


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
