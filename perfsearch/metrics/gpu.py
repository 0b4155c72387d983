"""Readings of the job's GPUs, each guarded by itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from perfsearch.metrics.guard import Guard
from perfsearch.metrics.nvml import Device, NvmlUnavailable, job_devices, open_nvml, text

MEGA = 1e6
GIB = 1024.0**3

_THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_HARMLESS = 0x001 | 0x002 | 0x100
"""Being idle, and clocks that somebody chose, are no slow-down."""

_KIB = 1024.0


class GpuReader:
    """Reads the job's GPUs; nothing is read of other jobs' cards.

    Args:
        uuids: the job's devices; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.
        guard: keeps what could not be read.

    """

    def __init__(self, uuids: Sequence[str] | None, guard: Guard) -> None:
        self.guard = guard
        self.devices: list[Device] = []
        self._turn = 0
        self._nvml: Any = None
        try:
            self.devices, missing = job_devices(uuids)
            self._nvml = open_nvml()
        except NvmlUnavailable as error:
            guard.missing("gpu", str(error))
            return
        for name, why in missing.items():
            guard.missing(name, why)

    def instant(self) -> dict[str, float]:
        """Values of this moment, by ``gpu_<index>_<name>``."""
        values: dict[str, float] = {}
        for device in self.devices:
            for name, value in self._device(device).items():
                values[f"gpu_{device.index}_{name}"] = value
        return values

    def slow(self) -> dict[str, float]:
        """PCIe throughput of one GPU, the next one at each call: a reading blocks for 20 ms."""
        if not self.devices:
            return {}
        device = self.devices[self._turn % len(self.devices)]
        self._turn += 1
        nvml, values = self._nvml, {}
        for word, counter in (
            ("transmit", nvml.NVML_PCIE_UTIL_TX_BYTES),
            ("receive", nvml.NVML_PCIE_UTIL_RX_BYTES),
        ):
            name = f"gpu_{device.index}_pcie_{word}_megabytes_per_s"
            reading = partial(nvml.nvmlDeviceGetPcieThroughput, device.handle, counter)
            rate = self.guard.read(name, reading)
            if rate is not None:
                values[name] = rate * _KIB / MEGA
        return values

    def _device(self, device: Device) -> dict[str, float]:
        nvml, handle = self._nvml, device.handle
        prefix = f"gpu_{device.index}_"

        def read(name: str, reading: Any) -> Any:
            return self.guard.read(prefix + name, reading)

        values: dict[str, float | None] = {
            "utilization_percentage": read(
                "utilization_percentage", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            ),
            "temperature_celsius": read(
                "temperature_celsius",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            "sm_clock_mhz": read(
                "sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            "memory_clock_mhz": read(
                "memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
        }
        memory = read("memory", lambda: _memory(nvml, handle))
        if memory is not None:
            values["memory_free_megabytes"] = memory.free / MEGA
            values["memory_usage_megabytes"] = memory.used / MEGA
        power = read("power_usage_watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        if power is not None:
            values["power_usage_watts"] = power / 1e3
        reasons = read("throttled_percentage", lambda: _throttle_bits(nvml, handle))
        if reasons is not None:
            values["throttled_percentage"] = 100.0 if reasons & ~_HARMLESS else 0.0
        return {name: float(value) for name, value in values.items() if value is not None}


def environment(
    uuids: Sequence[str] | None = None, own_process_ids: Collection[int] = ()
) -> dict[str, Any]:
    """What may disturb a measurement: clocks, throttling, and other processes on the devices.

    Args:
        uuids: the job's devices; ``None`` goes by ``CUDA_VISIBLE_DEVICES``.
        own_process_ids: processes that are the job's. In a container NVML may show a process under
            another number than the container does, so that one of ours looks foreign.

    Returns:
        Plain values: ``devices`` (one mapping a device), ``driver``, ``unsupported``.

    """
    guard = Guard()
    reader = GpuReader(uuids, guard)
    result: dict[str, Any] = {"devices": [], "unsupported": guard.unsupported}
    if not reader.devices:
        return result
    nvml = open_nvml()
    driver = guard.read("driver", lambda: text(nvml.nvmlSystemGetDriverVersion()))
    if driver is not None:
        result["driver"] = driver
    for device in reader.devices:
        prefix, handle = f"gpu_{device.index}_", device.handle
        entry: dict[str, Any] = {"uuid": device.uuid, "index": device.index, "mig": device.is_mig}
        entry.update(reader._device(device))
        readings: dict[str, Any] = {
            "name": lambda h=handle: text(nvml.nvmlDeviceGetName(h)),
            "max_sm_clock_mhz": lambda h=handle: nvml.nvmlDeviceGetMaxClockInfo(
                h, nvml.NVML_CLOCK_SM
            ),
            "power_limit_watts": lambda h=handle: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3,
            "throttle_reasons": lambda h=handle: [
                name for bit, name in _THROTTLE_REASONS.items() if _throttle_bits(nvml, h) & bit
            ],
            "other_processes": lambda h=handle: _processes(nvml, h, own_process_ids),
        }
        for name, reading in readings.items():
            value = guard.read(prefix + name, reading)
            if value is not None:
                entry[name] = value
        result["devices"].append(entry)
    return result


def used_memory_gib(uuid: str) -> float | None:
    """Memory in use on a device, read anew from the driver; ``None`` where it cannot be read.

    Args:
        uuid: the device, with or without ``GPU-``.

    """
    guard = Guard()
    devices = GpuReader([uuid], guard).devices
    if not devices:
        return None
    memory = guard.read("memory", lambda: _memory(open_nvml(), devices[0].handle))
    return None if memory is None else float(memory.used) / GIB


def device_map(uuids: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    """Which device ``gpu_<index>`` is: index to UUID and host name; empty without NVML."""
    devices = GpuReader(uuids, Guard()).devices
    host = os.uname().nodename
    return {f"gpu_{d.index}": {"uuid": d.uuid, "host": host} for d in devices}


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 keeps the driver's own reserve out of ``used``, as ``nvidia-smi`` does."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except nvml.NVMLError:
            pass  # a driver before 510 has version 1 only
    return nvml.nvmlDeviceGetMemoryInfo(handle)


def _throttle_bits(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _processes(nvml: Any, handle: Any, own: Collection[int]) -> list[dict[str, Any]]:
    return [
        {
            "pid": process.pid,
            "used_memory_mib": None
            if process.usedGpuMemory is None
            else process.usedGpuMemory / 1024.0**2,
        }
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid not in own
    ]
