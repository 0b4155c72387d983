"""A simulated step's tasks, as lines and for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ROWS = {
    "forward": (0, "computing"),
    "backward": (0, "computing"),
    "optimizer": (0, "computing"),
    "copy": (0, "computing"),
    "transfer": (1, "link"),
    "transfer of gradients": (1, "link"),
    "sum of gradients": (2, "sums of gradients"),
    "communication": (1, "link"),
}
MEASURED = ("forward", "backward", "communication")
"""Kinds of a measured step's tasks, in the order of the fields of ``OperatorTime``."""


@dataclass(frozen=True)
class Task:
    """One task on one device.

    Attributes:
        kind: what it does.
        name: operator, or the two that an edge connects.
        device: where.
        begin_us: from the step's begin.
        end_us: the same.

    """

    kind: str
    name: str
    device: int
    begin_us: float
    end_us: float


def chrome_trace(tasks: Sequence[Task], measured: Sequence[Task] = ()) -> dict[str, Any]:
    """The tasks as a Chrome trace, a process a device and a thread a timeline.

    Args:
        tasks: of the simulated step.
        measured: of a step in which operators were timed one thing at a time; each device's are a
            process of their own below the simulated one.

    """
    events: list[dict[str, Any]] = []
    for device in sorted({task.device for task in tasks}):
        events += _process(2 * device, f"device {device}", [*tasks])
        if any(task.device == device for task in measured):
            name = f"device {device}, measured one thing at a time"
            events += _process(2 * device + 1, name, [*measured])
    events += _slices(tasks, 0) + _slices(measured, 1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(process: int, name: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    events = [_named("process_name", process, 0, name)]
    events.append(
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    )
    rows = sorted({_ROWS[task.kind] for task in tasks})
    return [*events, *(_named("thread_name", process, row, name) for row, name in rows)]


def _slices(tasks: Sequence[Task], side: int) -> list[dict[str, Any]]:
    events = []
    for task in tasks:
        row, _ = _ROWS[task.kind]
        events.append(
            {
                "ph": "X",
                "name": task.name,
                "cat": task.kind,
                "pid": 2 * task.device + side,
                "tid": row,
                "ts": task.begin_us,
                "dur": task.end_us - task.begin_us,
                "args": {"kind": task.kind},
            }
        )
    return events


def _named(what: str, device: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": device, "tid": row, "args": {"name": name}}


def busy_lines(tasks: Sequence[Task], devices: int) -> list[str]:
    """A line a device: how long it computes, moves and sums."""
    lines = []
    for device in range(devices):
        own = [task for task in tasks if task.device == device]
        sums = {name: 0.0 for _, name in _ROWS.values()}
        for task in own:
            sums[_ROWS[task.kind][1]] += task.end_us - task.begin_us
        shown = ", ".join(f"{name} {us / 1e3:.3f} ms" for name, us in sums.items())
        lines.append(f"device {device}: {shown}")
    return lines
