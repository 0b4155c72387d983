"""Measured times of operators' parts: once per distinct shape, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.graph import Graph, Operator, Role
from perfsearch.parallel.soap.layouts import (
    class_key,
    degrees_of,
    gradients,
    layout,
    owned_keys,
)
from perfsearch.parallel.soap.machine import MOST, is_number
from perfsearch.parallel.soap.rules import signature
from perfsearch.parallel.soap.shared_sums import shares_statistics

SCHEMA = 1


class CostError(BadInputError):
    """Costs that cannot be read, or that lack a shape."""


@dataclass(frozen=True)
class ShardCost:
    """Time of one part of an operator.

    Attributes:
        forward_us: on the device; likewise backward.
        forward_host_us: of the host that launches it; likewise backward.
        rows_us: of a table's backward pass and update together, by the rows that were read.

    """

    forward_us: float
    backward_us: float
    forward_host_us: float = 0.0
    backward_host_us: float = 0.0
    rows_us: float = 0.0


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
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(self.to_json(), indent=0) + "\n")
        unfinished.rename(path)

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


def file_of(directory: Path, device: str, torch: str) -> Path:
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
        for degrees in degrees_of(operator, devices, roles):
            for part in layout(operator, degrees, owned[operator.name], 0.0).parts:
                shard = Shard(operator, part, wanted)
                if shard.key not in seen:
                    seen.add(shard.key)
                    yield shard
