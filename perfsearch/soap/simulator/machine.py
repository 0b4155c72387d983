"""The machine that is planned for: its devices, and how long its transfers take.

Measured once and kept as a readable JSON file, which can be edited to plan for hardware that is
not here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import write_text
from perfsearch.soap.graph import Graph, Operator, Rectangle, Role
from perfsearch.soap.parts import (
    class_key,
    gradients,
    layout_of,
    owned_keys,
    shares_statistics,
    splits_of,
)
from perfsearch.soap.rules.base import signature

SCHEMA = 1

KINDS = ("exchange", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce")
"""In the order of the numbers in ``memory``. The size of an exchange is the larger of what a device
sends and receives, and its members are the peers; of an all-gather and a reduce-scatter it is the
whole tensor; of an all-to-all what a device holds; of the others what each device holds."""

MOST = 1e9
"""Of every number in a file: longer times than a thousand seconds are slips."""

_ABOVE_0 = ("memory_gib", "sync_slowdown")
_FROM_0 = (
    "transfer_host_us",
    "sync_host_us",
    "step_us",
    "host_us",
    "optimizer_us",
    "optimizer_us_per_mib",
    "state_per_weight",
    "copy_us",
    "copy_us_per_mib",
    "task_us",
    "bucket_mib",
)

Curve = dict[int, dict[int, float]]
"""Members to bytes to microseconds."""


class MachineError(BadInputError):
    """A machine file that cannot be used; the message names the file, the entry and the remedy."""


@dataclass(frozen=True)
class Machine:
    """Devices, transfers, and what the execution adds.

    Attributes:
        name: of the device, or what the file's author calls it.
        devices: number of them.
        devices_per_node: those with consecutive numbers that share a node.
        memory_gib: of a device.
        within: by kind, transfers inside a node.
        across: the same for transfers that cross nodes; empty where there is one node.
        beyond: the same for further levels of links, as between racks or beside NVLink pairs.
        links: by pair of devices, the level of what connects them: 0 is ``within``, 1 ``across``,
            from 2 on those of ``beyond``, the best first; empty: by node. A collective goes by its
            worst pair.
        speeds: of each device, as a share of the one whose parts were timed; empty: all alike.
        transfer_host_us: time of the host for a transfer that a device takes part in.
        sync_host_us: the same for the sum of a gradient.
        step_us: what a step takes beside its tasks.
        host_us: what a step keeps the host beside launching tasks, while devices work: loading the
            next batch, launching a replayed step. No step is shorter.
        optimizer_us: what the optimizer takes beside the weights' traffic.
        optimizer_us_per_mib: time for a MiB of weights.
        state_per_weight: bytes of optimizer state for a byte of weights.
        copy_us: time of packing what is sent, or putting together what came, beside its traffic.
        copy_us_per_mib: of the traffic.
        task_us: what each part of an operator takes beside its own time, each way.
        sync_on_link: whether sums of gradients queue behind other transfers of the device.
        updates_rows: whether tables of one device alone are updated by the rows that were read.
        can_replay: whether steps may be replayed, so that launching costs the host nothing.
        sync_slowdown: how many times longer sums of gradients take beside computing than alone.
        calibrated: by what measured step ``step_us``, ``host_us``, ``task_us`` and
            ``sync_slowdown`` were fitted; empty: not yet.
        bucket_mib: gradients that are summed together; 0: each operator's by themselves.

    """

    name: str
    devices: int
    devices_per_node: int
    memory_gib: float
    within: dict[str, Curve]
    across: dict[str, Curve] = field(default_factory=dict)
    beyond: tuple[dict[str, Curve], ...] = ()
    links: tuple[tuple[int, ...], ...] = ()
    speeds: tuple[float, ...] = ()
    transfer_host_us: float = 0.0
    sync_host_us: float = 0.0
    step_us: float = 0.0
    host_us: float = 0.0
    optimizer_us: float = 0.0
    optimizer_us_per_mib: float = 0.0
    state_per_weight: float = 0.0
    copy_us: float = 0.0
    copy_us_per_mib: float = 0.0
    task_us: float = 0.0
    sync_slowdown: float = 1.0
    sync_on_link: bool = False
    updates_rows: bool = False
    can_replay: bool = False
    calibrated: str = ""
    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node"):
            if type(getattr(self, name)) is not int:
                raise MachineError(f"{name}={getattr(self, name)!r}: a whole number is needed")
        for name in (*_ABOVE_0, *_FROM_0):
            if not is_number(getattr(self, name), above_0=name in _ABOVE_0):
                least = "above 0" if name in _ABOVE_0 else "0 or more"
                raise MachineError(
                    f"{name}={getattr(self, name)!r}: a number is needed, {least} and at most "
                    f"{MOST:g}"
                )
        if self.devices < 1 or not 1 <= self.devices_per_node <= self.devices:
            raise MachineError(
                f"devices {self.devices}, devices_per_node {self.devices_per_node}: at least one "
                "device is needed, and a node has one to all of them"
            )
        _check_curves("within", self.within, needed=self.devices > 1)
        used = {level for row in self.links for level in row}
        by_node = not self.links and self.devices_per_node < self.devices
        _check_curves("across", self.across, needed=by_node or 1 in used)
        for number, curves in enumerate(self.beyond):
            _check_curves(f"beyond.{number}", curves, needed=number + 2 in used)
        self._check_links()
        self._check_speeds()

    def _check_links(self) -> None:
        if not self.links:
            return
        square = len(self.links) == self.devices and all(
            len(row) == self.devices for row in self.links
        )
        if not square:
            raise MachineError(
                f"links: a row of {self.devices} levels for each of {self.devices} devices is "
                "needed, or none"
            )
        most = 1 + len(self.beyond)
        for one, row in enumerate(self.links):
            for other, level in enumerate(row):
                if type(level) is not int or not 0 <= level <= most:
                    raise MachineError(
                        f"links.{one}.{other}={level!r}: a level from 0 to {most} is needed: 0 is "
                        "within, 1 across, further ones those of beyond"
                    )
                if level != self.links[other][one]:
                    raise MachineError(f"links.{one}.{other}={level!r}: not as links.{other}.{one}")

    def _check_speeds(self) -> None:
        if self.speeds and len(self.speeds) != self.devices:
            raise MachineError(
                f"speeds: one for each of {self.devices} devices is needed, or none; there are "
                f"{len(self.speeds)}"
            )
        for device, speed in enumerate(self.speeds):
            if not is_number(speed, above_0=True):
                raise MachineError(f"speeds.{device}={speed!r}: a number above 0 is needed")

    @property
    def levels(self) -> tuple[dict[str, Curve], ...]:
        """Curves by level of the links."""
        return (self.within, self.across or self.within, *self.beyond)

    def level(self, one: int, other: int) -> int:
        """Of what connects two devices."""
        if self.links:
            return self.links[one][other]
        return int(one // self.devices_per_node != other // self.devices_per_node)

    def curves_among(self, devices: Sequence[int]) -> dict[str, Curve]:
        """Transfers among devices: those of the worst pair."""
        pairs = itertools.combinations(devices, 2)
        return self.levels[max((self.level(a, b) for a, b in pairs), default=0)]

    def speed(self, device: int) -> float:
        """Of a device, as a share of the one whose parts were timed."""
        return self.speeds[device] if self.speeds else 1.0

    def write(self, path: Path) -> None:
        """Write it for people to read and edit, at once or not at all."""
        write_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Read what ``write`` wrote, or an edited copy.

        Raises:
            MachineError: no such file, or an entry is missing, unknown or impossible.

        """
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise MachineError(f"{path}: not a machine file: {error}") from error
        if not isinstance(record, dict) or record.pop("schema", None) != SCHEMA:
            raise MachineError(f"{path}: schema {SCHEMA} is needed; measure the machine again")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise MachineError(f"{path}: {unknown[0]}: no such entry; known: {sorted(known)}")
        try:
            for side in ("within", "across"):
                record[side] = _curves(record.get(side, {}))
            record["beyond"] = tuple(_curves(curves) for curves in record.get("beyond", ()))
            record["links"] = tuple(tuple(row) for row in record.get("links", ()))
            record["speeds"] = tuple(record.get("speeds", ()))
            return cls(**record)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MachineError(f"{path}: {error}") from error


def uniform(
    devices: int,
    *,
    latency_us: float,
    gib_per_s: float,
    memory_gib: float,
    name: str = "uniform",
    **more: Any,
) -> Machine:
    """A machine whose links all have one latency and bandwidth, by ring and tree arithmetic.

    Args:
        devices: number of them.
        latency_us: of a message.
        gib_per_s: of a device's link, each direction.
        memory_gib: of a device.
        name: of the machine.
        more: further entries of ``Machine``.

    """
    microseconds_per_byte = 1e6 / (gib_per_s * 2**30)
    sizes = [2**p for p in range(10, 31, 4)]

    def curve(latency: float, factor: float) -> dict[int, float]:
        return {s: latency_us * latency + s * factor * microseconds_per_byte for s in sizes}

    members = sorted({min(2**p, devices) for p in range(1, max(devices - 1, 1).bit_length() + 1)})
    within: dict[str, Curve] = {kind: {} for kind in KINDS}
    for n in members:
        steps = math.ceil(math.log2(n)) if n > 1 else 1
        share = (n - 1) / n
        within["exchange"][n - 1 if n > 1 else 1] = curve(1 + 0.1 * max(n - 2, 0), 1.0)
        within["all_gather"][n] = curve(steps, share)
        within["reduce_scatter"][n] = curve(steps, share)
        within["all_to_all"][n] = curve(1 + 0.1 * (n - 2), share)
        within["broadcast"][n] = curve(steps, 1.0)
        within["all_reduce"][n] = curve(2 * steps, 2 * share)
    return Machine(
        name=name,
        devices=devices,
        devices_per_node=devices,
        memory_gib=memory_gib,
        within=within,
        **more,
    )


def for_devices(machine: Machine, devices: int) -> tuple[Machine, str]:
    """A measured machine with another number of devices, and what of it is a guess.

    Args:
        machine: as measured.
        devices: to plan for.

    """
    if devices == machine.devices:
        return machine, ""
    if machine.devices == 1:
        guess = uniform(devices, latency_us=20.0, gib_per_s=10.0, memory_gib=machine.memory_gib)
        links = guess.within
        found = replace(machine, devices=devices, devices_per_node=devices, within=links)
        return found, "links were not measured, since one device has none: 20 us, 10 GiB/s"
    if machine.across:
        node = min(machine.devices_per_node, devices)
        found = replace(machine, devices=devices, devices_per_node=node, links=(), speeds=())
        return found, f"nodes have {node} devices, and are linked as those that were measured"
    node = min(machine.devices, devices)
    if devices <= machine.devices:
        return replace(machine, devices=devices, devices_per_node=node), ""
    return (
        replace(machine, devices=devices, devices_per_node=node, across=machine.within),
        f"nodes have {node} devices, and links between nodes are as those within",
    )


def at_members(curves: Curve, members: int) -> dict[int, float]:
    """The curve for a number of members: its own, or between those of its neighbours.

    In it no size takes longer than a larger one, whatever disturbed the measurement: parts of an
    exchange could otherwise take less than no time beside the latency, and so could large sizes,
    for which the last two points are continued.
    """
    curve = _between(curves, members)
    found, least = {}, math.inf
    for size in sorted(curve, reverse=True):
        least = found[size] = min(curve[size], least)
    return found


def _between(curves: Curve, members: int) -> dict[int, float]:
    known = sorted(curves)
    if members in curves:
        return curves[members]
    below = [n for n in known if n < members]
    above = [n for n in known if n > members]
    if not below or not above:
        # Beyond what was measured the last two say how it goes on.
        if len(known) < 2:
            return curves[known[0]]
        low, high = (known[0], known[1]) if not below else (known[-2], known[-1])
    else:
        low, high = below[-1], above[0]
    share = (members - low) / (high - low)
    floor = min(curves[known[0]].values())
    return {
        size: max(curves[low][size] + share * (curves[high][size] - curves[low][size]), floor)
        for size in curves[low]
        if size in curves[high]
    }


def at_size(curve: Mapping[int, float], size: float) -> float:
    """Microseconds for a size, linear between its points and beyond the last two."""
    points = sorted(curve)
    if size <= points[0] or len(points) == 1:
        return curve[points[0]]
    upper = next((i for i, p in enumerate(points) if p >= size), len(points) - 1)
    low, high = points[upper - 1], points[upper]
    return curve[low] + (size - low) * (curve[high] - curve[low]) / (high - low)


def _curves(record: Mapping[str, Any]) -> dict[str, Curve]:
    return {
        kind: {
            int(members): {int(size): float(us) for size, us in points.items()}
            for members, points in curve.items()
        }
        for kind, curve in record.items()
    }


def _check_curves(side: str, curves: Mapping[str, Curve], needed: bool) -> None:
    unknown = sorted(set(curves) - set(KINDS))
    if unknown:
        raise MachineError(f"{side}.{unknown[0]}: unknown; known: {', '.join(KINDS)}")
    for kind in KINDS if needed else ():
        if not curves.get(kind):
            of = "device" if side == "within" else "node"
            raise MachineError(f"{side}.{kind}: no curve, and there is more than one {of}")
    for kind, curve in curves.items():
        for members, points in curve.items():
            _check_points(f"{side}.{kind}.{members}", points)


def _check_points(name: str, points: Mapping[int, float]) -> None:
    if not points:
        raise MachineError(f"{name}: no points; sizes in bytes and their microseconds are needed")
    for size, time_us in points.items():
        if size < 0:
            raise MachineError(f"{name}.{size}: sizes are in bytes, from 0 on")
        if not is_number(time_us, above_0=True):
            raise MachineError(
                f"{name}.{size}={time_us!r}: microseconds are needed, above 0 and at most {MOST:g}"
            )


def is_number(value: object, above_0: bool = False) -> bool:
    """Whether it is a number that can be planned with: from 0, or above it, to ``MOST``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MOST if above_0 else 0 <= value <= MOST


# -----------------------------------------------------------------------------
# Measured times of operators' parts: once per distinct shape, kept on disk.


class CostError(BadInputError):
    """Costs that cannot be read, or that lack a shape."""


@dataclass(frozen=True)
class ShardCost:
    """Time of one part of an operator.

    Attributes:
        forward_us: on the device; likewise backward.
        forward_host_us: of the host that launches it; likewise backward.
        rows_us: of a table's backward pass and update together, by the rows that were read.
        spread: between the quartiles of repeated measurements of the forward pass, over their
            median.

    """

    forward_us: float
    backward_us: float
    forward_host_us: float = 0.0
    backward_host_us: float = 0.0
    rows_us: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Shard:
    """A part whose time is wanted."""

    operator: Operator
    part: Rectangle
    gradients: tuple[bool, ...]

    @property
    def key(self) -> str:
        """The same for parts that take the same time, in every process."""
        more = ["shared"] if shares_statistics(self.operator, self.part) else []
        more += [f"frozen {p.name}" for p in self.operator.parameters if not p.trained]
        words = _words((signature(self.operator, self.part), self.gradients, *more))
        return hashlib.blake2b(words.encode(), digest_size=12).hexdigest()

    @property
    def text(self) -> str:
        """For people."""
        sizes = "x".join(str(high - low) for low, high in self.part)
        return f"{'+'.join(stage.kind for stage in self.operator.stages)} {sizes}"


def _words(value: object) -> str:
    """A text that a value and the text it is saved as share."""
    if isinstance(value, tuple):
        return f"({','.join(map(_words, value))})"
    return value if isinstance(value, str) else repr(value)


class CostTable:
    """Costs of one kind of device under one torch.

    Args:
        device: its name.
        torch: version.

    Attributes:
        entries: by the shard's key.

    """

    def __init__(self, device: str, torch: str) -> None:
        self.device, self.torch = device, torch
        self.entries: dict[str, ShardCost] = {}
        self._texts: dict[str, str] = {}

    def add(self, shard: Shard, cost: ShardCost) -> None:
        """Take up a measurement."""
        self.entries[shard.key] = cost
        self._texts[shard.key] = shard.text

    def cost_of(self, operator: Operator, part: Rectangle, wanted: tuple[bool, ...]) -> ShardCost:
        """The time of a part.

        Raises:
            CostError: this shape was not measured.

        """
        shard = Shard(operator, part, wanted)
        if shard.key not in self.entries:
            raise CostError(
                f"operator {operator.name}: no cost of {shard.text} for {self.device} under torch "
                f"{self.torch}. Measure it: run the search on such a device"
            )
        return self.entries[shard.key]

    def merge(self, other: CostTable) -> None:
        """Take up what another table has."""
        self.entries.update(other.entries)
        self._texts.update(other._texts)

    def to_json(self) -> dict[str, Any]:
        """Plain values, readable."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "torch": self.torch,
            "costs": {
                key: {"what": self._texts.get(key, ""), **asdict(cost)}
                for key, cost in sorted(self.entries.items())
            },
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CostTable:
        """Rebuild it from ``to_json``.

        Raises:
            ValueError, KeyError, TypeError: it is not one.

        """
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']}; {SCHEMA} is needed")
        table = cls(record["device"], record["torch"])
        for key, entry in record["costs"].items():
            table._texts[key] = entry["what"]
            times = {name: value for name, value in entry.items() if name != "what"}
            for name, time_us in times.items():
                if not is_number(time_us):
                    raise ValueError(
                        f"costs.{key}.{name}={time_us!r}: microseconds are needed, from 0 to "
                        f"{MOST:g}"
                    )
            table.entries[key] = ShardCost(**times)
        return table

    def write(self, path: Path) -> None:
        """Write it for people to read and edit, at once or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=0) + "\n")

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Read what ``write`` wrote, or an edited copy.

        Raises:
            CostError: no such file, or not one of costs.

        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CostError(f"{path}: not a table of costs: {error}") from error


def cost_file(directory: Path, device: str, torch: str) -> Path:
    """Where the costs of a kind of device are kept."""
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"costs-{device}-torch-{torch}")
    return directory / f"{name}.json"


def shards_of(
    graph: Graph, devices: int, roles: frozenset[Role] = frozenset(Role)
) -> Iterator[Shard]:
    """Each distinct part that a search over so many devices may have to know the time of."""
    owned = owned_keys(graph)
    classes, seen = set(), set()
    for operator in graph.planned:
        kind = class_key(graph, operator, owned[operator.name])
        if kind in classes:
            continue
        classes.add(kind)
        wanted = gradients(graph, operator)
        for degrees, sums in splits_of(operator, devices, roles):
            for part in layout_of(operator, degrees, owned[operator.name], 0.0, sums=sums).parts:
                shard = Shard(operator, part, wanted)
                if shard.key not in seen:
                    seen.add(shard.key)
                    yield shard
