"""Gradients of what several devices store: summed in buckets, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.communicators import Communicators, Devices
from perfsearch.parallel.soap.graph import Graph
from perfsearch.parallel.soap.placement import Cell, cells, parameters, tiles
from perfsearch.parallel.soap.rectangles import volume, within
from perfsearch.parallel.soap.rules import sizes

BUCKET_BYTES = 25 * 2**20

Gradients = dict[str, torch.Tensor]
"""By the parameters' keys, of what this device stores."""


@dataclass(frozen=True)
class Bucket:
    """Pieces that are summed by one all-reduce.

    Attributes:
        devices: that store them.
        dtype: torch's name of it.
        cells: pieces.
        ready: place of the operator, in topological order, whose backward pass gives the last
            of their gradients.

    """

    devices: Devices
    dtype: str
    cells: tuple[Cell, ...]
    ready: int

    @property
    def elements(self) -> int:
        """Number of them."""
        return sum(cell.elements for cell in self.cells)


def buckets(
    graph: Graph, placed: Sequence[Mapping[str, Rectangle]], capacity_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """All of a plan, in the one order in which they are summed on all ranks.

    Args:
        graph: of the model.
        placed: by ``placement.placements``.
        capacity_bytes: of a bucket; a larger piece has one by itself.

    """
    known = parameters(graph)
    place = {operator.name: i for i, operator in enumerate(graph.operators)}
    stored: dict[str, dict[int, Rectangle]] = {}
    ready: dict[str, int] = {}
    for device, mine in enumerate(placed):
        for key, tile in tiles(graph, mine).items():
            stored.setdefault(key, {})[device] = tile.rectangle
            first = min(place[use.operator] for use in tile.uses)
            ready[key] = min(ready.get(key, first), first)
    order = sorted((k for k in stored if known[k].trained), key=lambda k: (-ready[k], k))
    found: list[Bucket] = []
    filling: dict[tuple[Devices, str], list[Cell]] = {}

    def close(target: tuple[Devices, str]) -> None:
        content = filling.pop(target)
        last = min(ready[cell.key] for cell in content)
        found.append(Bucket(target[0], target[1], tuple(content), last))

    for key in order:
        size = getattr(torch, known[key].dtype).itemsize
        for cell in cells(key, stored[key]):
            if len(cell.devices) < 2:
                continue
            target = (cell.devices, known[key].dtype)
            held = sum(c.elements for c in filling.get(target, ())) * size
            if held and held + cell.elements * size > capacity_bytes:
                close(target)
            filling.setdefault(target, []).append(cell)
    for target in list(filling):
        close(target)
    return sorted(found, key=lambda b: (-b.ready, b.devices, b.cells[0].key))


class Synchroniser:
    """Sums this rank's buckets; each is started when its gradients are there.

    Args:
        plan: all buckets.
        stored: what this rank stores of each parameter.
        rank: this device.
        groups: where the buckets' devices were ensured.

    Attributes:
        keys: of parameters of which this rank sums anything.
        summed_bytes: of gradients that this rank sums with others.

    """

    def __init__(
        self,
        plan: Sequence[Bucket],
        stored: Mapping[str, Rectangle],
        rank: int,
        groups: Communicators,
    ) -> None:
        self._by_place: dict[int, list[RankBucket]] = {}
        self.keys = {c.key for b in plan if rank in b.devices for c in b.cells}
        self.summed_bytes = sum(
            bucket.elements * getattr(torch, bucket.dtype).itemsize
            for bucket in plan
            if rank in bucket.devices
        )
        for bucket in plan:
            if rank in bucket.devices:
                one = RankBucket(bucket, stored, groups)
                self._by_place.setdefault(bucket.ready, []).append(one)
        self._started: list[RankBucket] = []

    def ready(self, place: int) -> Sequence[RankBucket]:
        """What the backward pass of operator ``place`` makes ready."""
        return self._by_place.get(place, ())

    def after(self, place: int, gradients: Gradients) -> None:
        """Start what the backward pass of operator ``place`` has made ready."""
        for bucket in self.ready(place):
            bucket.start(gradients)
            self._started.append(bucket)

    def forget(self) -> None:
        """Drop what was started and will never end."""
        self._started.clear()

    def finish(self, gradients: Gradients) -> None:
        """Wait for all, and put the sums where the gradients were."""
        for bucket in self._started:
            bucket.finish(gradients)
        self._started.clear()


class RankBucket:
    """A bucket on one rank that has a part in it.

    Args:
        bucket: what is summed.
        stored: what this rank stores of each parameter.
        groups: where the bucket's devices were ensured.

    """

    def __init__(
        self, bucket: Bucket, stored: Mapping[str, Rectangle], groups: Communicators
    ) -> None:
        self._groups = groups
        self._devices = bucket.devices
        self._keys = [cell.key for cell in bucket.cells]
        self._cuts = [
            None if cell.rectangle == stored[cell.key] else within(cell.rectangle, stored[cell.key])
            for cell in bucket.cells
        ]
        self._shapes = [sizes(cell.rectangle) for cell in bucket.cells]
        self._lengths = [volume(cell.rectangle) for cell in bucket.cells]
        self._direct = len(self._keys) == 1 and self._cuts[0] is None

    @property
    def shares(self) -> list[tuple[str, float]]:
        """Keys of parameters, each with its share of the elements; the shares add up to 1."""
        whole = sum(self._lengths)
        return [(k, n / whole) for k, n in zip(self._keys, self._lengths, strict=True)]

    def start(self, gradients: Gradients) -> None:
        """Begin to sum them."""
        if self._direct:
            # one large tensor is summed where it is
            self._flat = gradients[self._keys[0]].contiguous()
        else:
            parts = [
                gradients[key] if cut is None else gradients[key][cut]
                for key, cut in zip(self._keys, self._cuts, strict=True)
            ]
            self._flat = torch.cat([part.reshape(-1) for part in parts])
        self._work = self._groups.launch(
            self._devices,
            lambda group: dist.all_reduce(self._flat, group=group, async_op=True),
        )

    def finish(self, gradients: Gradients) -> None:
        """Wait for the sums, and put them where the gradients were."""
        self._work.wait()
        if self._direct:
            gradients[self._keys[0]] = self._flat
            return
        parts = self._flat.split(self._lengths)
        for key, cut, shape, part in zip(self._keys, self._cuts, self._shapes, parts, strict=True):
            if cut is None:
                gradients[key] = part.view(shape)
            else:
                whole = gradients[key].clone()  # other pieces of it may be on their way
                whole[cut] = part.view(shape)
                gradients[key] = whole
