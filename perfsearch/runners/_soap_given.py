"""Tables that were given by ``runner.tables``, beside what else was asked for."""

from __future__ import annotations

from dataclasses import replace

from perfsearch.core.errors import BadInputError
from perfsearch.runners._soap_identity import is_given
from perfsearch.runners._soap_tables import Inputs
from perfsearch.workers.environment import Hardware
from perfsearch.workloads.spec import WorkloadSpec


def settle(
    given: Inputs,
    tables: str,
    workload: WorkloadSpec,
    hardware: Hardware,
    nproc: int | None,
    planning: bool,
) -> WorkloadSpec:
    """The workload that the tables are of; a plan is made for their number of devices.

    Args:
        given: what the tables hold.
        tables: their directory.
        workload: as it was asked for.
        hardware: that is here.
        nproc: as it was asked for; ``None``: not at all.
        planning: nothing will be run, so that neither devices nor workload need be asked for.

    Raises:
        BadInputError: something else was asked for than what the tables are of.
        ValueError: the workload itself cannot work.

    """
    devices = given.machine.devices
    if planning and nproc not in (None, devices):
        raise BadInputError(
            f"nproc={nproc}: runner.tables={tables} are of {devices} devices. Leave nproc out, or "
            f'set "devices" in {tables}/machine.json to plan for others'
        )
    if not planning and devices != hardware.world_size:
        raise BadInputError(
            f"runner.tables={tables}: they are of {devices} devices and here are "
            f"{hardware.world_size}. Set nproc, or measure here without runner.tables"
        )
    if planning and is_given(workload):
        given.job.require(workload, tables)
    settled = workload.resolve(hardware.device, hardware.memory_gib, devices)
    if planning:
        return replace(settled, global_batch=given.graph.batch)
    given.job.require(settled, tables)
    return settled


def line(inputs: Inputs, tables: str | None) -> str:
    """What is planned for, for the terminal."""
    devices = inputs.machine.devices
    of = "" if tables is None else f" of runner.tables={tables}"
    return f"planning for {devices} device{'s' if devices > 1 else ''}{of}, {inputs.job}"
