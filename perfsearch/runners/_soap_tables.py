"""What plans are simulated from: the job's graph, the machine, and costs; measured or read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from perfsearch.core.errors import BadInputError
from perfsearch.parallel.soap import costs, graph_file
from perfsearch.parallel.soap.costs import CostTable, ShardCost
from perfsearch.parallel.soap.graph import Graph, Role
from perfsearch.parallel.soap.machine import Machine
from perfsearch.parallel.soap.tasks import CostOf
from perfsearch.runners._soap_identity import JOB, Identity

GRAPH, MACHINE, COSTS = "graph.json", "machine.json", "costs.json"

Measure = Callable[[Path, list[str], Path | None], None]
"""Leaves the three files in a directory, costs less those of the given keys; of the machine of a
file, where one is given, only what the job's optimizer adds is measured."""


@dataclass(frozen=True)
class Inputs:
    """The three, ready to plan with, and the job that they are of."""

    graph: Graph
    machine: Machine
    costs: CostTable
    job: Identity

    def write(self, directory: Path) -> None:
        """Leave them in a directory from which they can be read again."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / GRAPH).write_text(graph_file.dump(self.graph))
        self.machine.write(directory / MACHINE)
        self.costs.write(directory / COSTS)
        self.job.write(directory)

    def cost_of(self, launches_are_free: bool) -> CostOf:
        """Times of parts; without those of the host where launches are replayed."""
        if not launches_are_free:
            return self.costs.cost_of

        def cost(operator, part, wanted):  # type: ignore[no-untyped-def]
            found = self.costs.cost_of(operator, part, wanted)
            return ShardCost(found.forward_us, found.backward_us)

        return cost


def read(directory: Path) -> Inputs:
    """Read what ``Inputs.write`` wrote, or edited copies.

    Raises:
        BadInputError: a file is missing or cannot be used.

    """
    try:
        graph = graph_file.parse((directory / GRAPH).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{directory / GRAPH}: not a captured graph: {error}") from error
    machine, table = Machine.read(directory / MACHINE), CostTable.read(directory / COSTS)
    return Inputs(graph, machine, table, Identity.read(directory, graph))


def measured(
    directory: Path,
    cache: Path,
    device: str,
    torch: str,
    devices: int,
    job: Identity,
    measure: Measure,
) -> Inputs:
    """Measure what is not known yet of this kind of device.

    Args:
        directory: for the files of this search; used as they are where they are complete, which
            the job's name, written last, says.
        cache: for what other searches can use.
        device: name of the devices.
        torch: version.
        devices: number of them.
        job: that is measured.
        measure: does it.

    """
    if all((directory / name).exists() for name in (GRAPH, MACHINE, COSTS, JOB)):
        return read(directory)
    known_costs = costs.file_of(cache, device, torch)
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"machine-{device}-x{devices}-torch-{torch}.json")
    known = CostTable.read(known_costs) if known_costs.exists() else CostTable(device, torch)
    known_machine = cache / name
    measure(directory, list(known.entries), known_machine if known_machine.exists() else None)
    if not known_machine.exists():
        Machine.read(directory / MACHINE).write(known_machine)
    known.merge(CostTable.read(directory / COSTS))
    known.write(known_costs)
    known.write(directory / COSTS)
    job.write(directory)
    return read(directory)


def limited(inputs: Inputs, memory_gib: float | None) -> Inputs:
    """The same with less memory a device, where that is wanted."""
    if memory_gib is None:
        return inputs
    return replace(inputs, machine=replace(inputs.machine, memory_gib=memory_gib))


def roles_of(names: tuple[str, ...]) -> frozenset[Role]:
    """The kinds of dimensions that may be split.

    Raises:
        ValueError: a name is none of them.

    """
    allowed = [str(role) for role in Role]
    for name in names:
        if name not in allowed:
            raise ValueError(f"runner.split={list(names)}: {name} is none of {', '.join(allowed)}")
    return frozenset(Role(name) for name in names)
