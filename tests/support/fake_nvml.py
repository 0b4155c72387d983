"""A stand-in for the module pynvml: cards, MIG instances, readings that fail."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perfsearch.metrics import gpu


class NVMLError(Exception):
    """The class that pynvml raises."""


class FakeNvml(ModuleType):
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVMLError = NVMLError

    def __init__(self, cards: list[dict[str, Any]]) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.failing: dict[tuple[str, str], Exception] = {}
        self.memory_reads = 0

    def fail(self, uuid: str, function: str, error: Exception | None = None) -> None:
        self.failing[uuid, function] = error or NVMLError("Not Supported")

    def _check(self, handle: dict[str, Any], function: str) -> None:
        if (handle["uuid"], function) in self.failing:
            raise self.failing[handle["uuid"], function]

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        self._check(self.cards[index], "open")
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:
        return handle["uuid"]

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return handle.get("name", "NVIDIA H100 80GB HBM3")

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> list[int]:
        if "mig" not in handle:
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], slot: int) -> Any:
        if slot >= len(handle["mig"]):
            raise NVMLError("Not Found")
        return handle["mig"][slot]

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> Any:
        self._check(handle, "utilization")
        if handle["uuid"].startswith("MIG-"):
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=handle.get("utilization", 50), memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any], version: Any = None) -> Any:
        self._check(handle, "memory")
        self.memory_reads += 1
        used = handle.get("used", 2 * 1024**3)
        return SimpleNamespace(used=used, free=80 * 1024**3 - used, total=80 * 1024**3)

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> int:
        self._check(handle, "power")
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: dict[str, Any]) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> int:
        self._check(handle, "temperature")
        return 60

    def nvmlDeviceGetClockInfo(self, handle: dict[str, Any], clock: int) -> int:
        self._check(handle, "clock")
        return {1: 1980, 2: 2619}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle: dict[str, Any], clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: dict[str, Any]) -> int:
        return handle.get("throttle", 0)

    def nvmlDeviceGetPcieThroughput(self, handle: dict[str, Any], counter: int) -> int:
        return 1_000_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> Any:
        return [
            SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in handle.get("processes", {}).items()
        ]


def install(monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any]]) -> FakeNvml:
    """Put a fake in the place of pynvml, with CUDA_VISIBLE_DEVICES unset."""
    fake = FakeNvml(cards)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu, "_opened_by", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake
