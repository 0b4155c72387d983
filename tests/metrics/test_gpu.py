from __future__ import annotations

import sys

from support.fake_nvml import install

from perfsearch.metrics import gpu
from perfsearch.metrics.gpu import GpuReader
from perfsearch.metrics.reading import Guard


def test_one_failing_reading_leaves_every_other(four_cards):
    """mlflow/mlflow#14736: each NVML call is guarded by itself, whatever class it raises."""
    four_cards.fail("GPU-a0", "power")
    four_cards.fail("GPU-b0", "utilization", RuntimeError("a class nobody expected"))
    guard = Guard()
    values = GpuReader(["GPU-a0", "GPU-b0"], guard).instant()
    assert "gpu_0_power_usage_watts" not in values
    assert values["gpu_0_utilization_percentage"] == 50
    assert "gpu_1_utilization_percentage" not in values
    assert values["gpu_1_power_usage_watts"] == 350
    assert values["gpu_1_memory_free_megabytes"] == 78 * 1024**3 / 1e6
    assert set(guard.unsupported) == {"gpu_0_power_usage_watts", "gpu_1_utilization_percentage"}
    assert "nobody expected" in guard.unsupported["gpu_1_utilization_percentage"]


def test_only_the_jobs_own_cards_are_read(four_cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c0")
    values = GpuReader(None, Guard()).instant()
    assert {name.split("_")[1] for name in values} == {"2"}


def test_mig_utilisation_is_left_out_and_never_zero(monkeypatch):
    install(monkeypatch, [{"uuid": "GPU-a0", "mig": [{"uuid": "MIG-a1"}]}])
    guard = Guard()
    values = GpuReader(["MIG-a1"], guard).instant()
    assert "gpu_0_utilization_percentage" not in values
    assert "gpu_0_utilization_percentage" in guard.unsupported
    assert values["gpu_0_memory_usage_megabytes"] == 2 * 1024**3 / 1e6


def test_throttling_counts_only_what_slows_the_card(four_cards):
    four_cards.cards[0]["throttle"] = 0x1 | 0x2
    four_cards.cards[1]["throttle"] = 0x4
    values = GpuReader(["GPU-a0", "GPU-b0"], Guard()).instant()
    assert values["gpu_0_throttled_percentage"] == 0
    assert values["gpu_1_throttled_percentage"] == 100


def test_pcie_is_read_of_one_card_a_turn(four_cards):
    reader = GpuReader(["GPU-a0", "GPU-b0"], Guard())
    assert {n[:5] for n in reader.slow()} == {"gpu_0"}
    assert {n[:5] for n in reader.slow()} == {"gpu_1"}
    assert reader.slow()["gpu_0_pcie_receive_megabytes_per_s"] == 1024.0


def test_environment_tells_clocks_reasons_and_other_processes(four_cards):
    four_cards.cards[1].update(throttle=0x44, processes={11: 3 * 1024**3, 12: None})
    found = gpu.environment(["GPU-b0"], own_process_ids=[12])
    (device,) = found["devices"]
    assert found["driver"] == "570.1"
    assert device["uuid"] == "GPU-b0"
    assert device["sm_clock_mhz"] == device["max_sm_clock_mhz"] == 1980
    assert device["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert device["other_processes"] == [{"pid": 11, "used_memory_mib": 3072.0}]
    assert found["unsupported"] == {}


def test_without_nvml_nothing_is_read_and_the_reason_is_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in gpu.environment()["unsupported"]["gpu"]
