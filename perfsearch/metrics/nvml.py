"""Which GPUs are the job's own, seen through NVML.

NVML numbers every card of the host in PCI order and knows nothing of ``CUDA_VISIBLE_DEVICES``, so
devices are found by UUID. Nothing here imports torch; ``pynvml`` is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_opened_by: set[int] = set()


class NvmlUnavailable(RuntimeError):
    """There is no NVML here: no NVIDIA driver, or no ``nvidia-ml-py``."""


@dataclass(frozen=True)
class Device:
    """One GPU or MIG instance of the job.

    Attributes:
        handle: NVML's handle of it.
        uuid: ``GPU-...`` or ``MIG-...``.
        index: the card's NVML index; for MIG instances their place in the job's list, as several
            may lie on one card.
        is_mig: whether it is a MIG instance.

    """

    handle: Any
    uuid: str
    index: int
    is_mig: bool = False


def open_nvml() -> Any:
    """Return the ``pynvml`` module, initialised in this process.

    Raises:
        NvmlUnavailable: the module or the driver is missing.

    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(f"pynvml (package nvidia-ml-py) is missing: {error}") from error
    if os.getpid() not in _opened_by:
        # A handle from before a fork is not valid in the child: initialise once a process.
        try:
            pynvml.nvmlInit()
        except Exception as error:
            raise NvmlUnavailable(f"NVML does not start: {error}") from error
        _opened_by.add(os.getpid())
    return pynvml


def job_devices(
    uuids: Sequence[str] | None = None, visible: str | None = None
) -> tuple[list[Device], dict[str, str]]:
    """Find the job's devices.

    Args:
        uuids: their UUIDs, with or without ``GPU-``; ``None`` goes by ``visible``.
        visible: a value of ``CUDA_VISIBLE_DEVICES``; ``None`` reads it from the environment.

    Returns:
        The devices, and for each one that was named but not found the reason.

    Raises:
        NvmlUnavailable: there is no NVML.

    """
    nvml = open_nvml()
    missing: dict[str, str] = {}
    if uuids is not None:
        found = []
        for uuid in uuids:
            device = _by_uuid(nvml, uuid)
            if device is None:
                missing[f"gpu {uuid}"] = "NVML knows no such device"
            else:
                found.append(device)
        return _numbered(found), missing
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    cards = list(_cards(nvml))
    if visible is None:
        return _numbered([_first_instance(nvml, card) for card in cards]), missing
    found = []
    for token in (part.strip() for part in visible.split(",")):
        chosen = _by_token(nvml, token, cards)
        if chosen is None:
            # CUDA ignores everything from the first invalid entry on; so do we.
            if token not in ("", "-1", "NoDevFiles"):
                missing[f"gpu {token}"] = "CUDA_VISIBLE_DEVICES names no such device"
            break
        found.append(chosen)
    return _numbered(found), missing


def text(value: Any) -> str:
    """NVML's strings as ``str``: older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _cards(nvml: Any) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Device(handle, text(nvml.nvmlDeviceGetUUID(handle)), index)
        except nvml.NVMLError:
            # A card that fell off the bus, or that this container may not open, is not ours.
            continue


def _instances(nvml: Any, card: Device) -> list[Device]:
    """MIG instances of a card; empty where MIG is off or unknown to the driver."""
    try:
        if nvml.nvmlDeviceGetMigMode(card.handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle)
    except nvml.NVMLError:
        return []
    found = []
    for slot in range(slots):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, slot)
            found.append(Device(handle, text(nvml.nvmlDeviceGetUUID(handle)), card.index, True))
        except nvml.NVMLError:
            continue  # an empty slot
    return found


def _first_instance(nvml: Any, card: Device) -> Device:
    """What CUDA makes of a card's index: its first MIG instance where MIG is on."""
    instances = _instances(nvml, card)
    return instances[0] if instances else card


def _by_uuid(nvml: Any, uuid: str) -> Device | None:
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    cards = list(_cards(nvml))
    for card in cards:
        if card.uuid in names:
            return card
    return next((i for card in cards for i in _instances(nvml, card) if i.uuid in names), None)


def _by_token(nvml: Any, token: str, cards: Sequence[Device]) -> Device | None:
    """One entry of ``CUDA_VISIBLE_DEVICES``: an index, or a UUID that may be cut short."""
    if token.isdigit():
        card = next((c for c in cards if c.index == int(token)), None)
        return None if card is None else _first_instance(nvml, card)
    if not token.startswith(("GPU-", "MIG-")):
        return None
    pool = list(cards)
    if token.startswith("MIG-"):
        pool = [i for card in cards for i in _instances(nvml, card)]
    matches = [device for device in pool if device.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _numbered(devices: Sequence[Device]) -> list[Device]:
    if not any(device.is_mig for device in devices):
        return list(devices)
    return [Device(d.handle, d.uuid, place, d.is_mig) for place, d in enumerate(devices)]
