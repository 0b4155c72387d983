from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from perfsearch.metrics import system
from perfsearch.metrics.system import SystemSampler, aggregates, merge_nodes, rates


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def sampler(four_cards, monkeypatch):
    """A sampler on a fake clock whose host totals are what the test sets."""
    clock = Clock()
    made = SystemSampler(0.5, ["GPU-b0"], clock=clock)
    totals = {"disk_iops": 0.0}
    monkeypatch.setattr(made._host, "counters", lambda: dict(totals))
    monkeypatch.setattr(made._host, "instant", lambda: {"system_memory_available_megabytes": 8.0})
    monkeypatch.setattr(system, "_FIRST_RATE_S", 0.0)
    made.test = (clock, totals, four_cards)
    return made


def tick(sampler, seconds, iops):
    clock, totals, _ = sampler.test
    clock.now += seconds
    totals["disk_iops"] += iops * seconds
    return sampler.sample()


def test_rates_are_weighted_by_their_overlap_with_the_window(sampler):
    sampler.sample()
    tick(sampler, 1.0, 100)
    tick(sampler, 3.0, 300)
    assert sampler.window(100.5, 102.0)["node_0/disk_iops"] == pytest.approx(
        (0.5 * 100 + 1.0 * 300) / 1.5
    )


def test_the_first_sample_gives_no_rate(sampler):
    sampler.test[1]["disk_iops"] = 1e9
    sampler.sample()
    assert "node_0/disk_iops" not in sampler.window(100.0, 100.0)
    tick(sampler, 1.0, 5)
    assert sampler.window(100.0, 101.0)["node_0/disk_iops"] == pytest.approx(5)


def test_a_window_shorter_than_the_interval_takes_its_own_sample(sampler):
    sampler.sample()
    clock, totals, cards = sampler.test
    clock.now, totals["disk_iops"] = 100.1, 4.0
    cards.cards[1]["utilization"] = 90
    found = sampler.window(100.05, 100.1)
    assert found["node_0/disk_iops"] == pytest.approx(40)
    assert found["node_0/gpu_1_utilization_percentage"] == 90


def test_values_of_the_moment_are_averaged_inside_the_window_only(sampler):
    cards = sampler.test[2]
    for utilization in (10, 20, 60, 100):
        cards.cards[1]["utilization"] = utilization
        tick(sampler, 1.0, 0)
    assert sampler.window(102.0, 103.0)["node_0/gpu_1_utilization_percentage"] == 40


def test_keys_carry_the_node_and_the_cluster_gets_aggregates(sampler):
    tick(sampler, 1.0, 1)
    found = sampler.window(101.0, 101.0)
    assert found["node_0/gpu_1_memory_free_megabytes"] == found["gpu_memory_free_megabytes"]
    assert found["system_memory_available_megabytes"] == 8.0
    assert not any("gpu_0" in key for key in found)


@pytest.mark.parametrize("names", [["eth0"], ["eth0", "eth1"]])
def test_interfaces_are_told_apart_where_there_are_several(sampler, names):
    keys = [
        f"interface/{n}/{way}_megabytes_per_s" for n in names for way in ("receive", "transmit")
    ]
    totals = sampler.test[1]
    for value in (0.0, 6.0):
        totals.update(dict.fromkeys(keys, value))
        tick(sampler, 2.0, 1)
    found = {k: v for k, v in sampler.window(102.0, 104.0).items() if "interface" in k}
    assert found == ({f"node_0/{key}": 3.0 for key in keys} if len(names) > 1 else {})


def test_memory_stays_bounded_and_means_survive_thinning(sampler, monkeypatch):
    monkeypatch.setattr(system, "KEPT_SAMPLES", 8)
    for _ in range(40):
        tick(sampler, 1.0, 7)
    assert len(sampler.series()) <= 9
    assert sampler.window(101.0, 140.0)["node_0/disk_iops"] == pytest.approx(7)
    assert sampler.series()[0]["time_s"] < 135


def test_a_reading_that_fails_is_named_once_and_the_rest_go_on(sampler):
    sampler.test[2].fail("GPU-b0", "power")
    tick(sampler, 1.0, 1)
    tick(sampler, 1.0, 1)
    found = sampler.window(100.0, 102.0)
    assert "node_0/gpu_1_power_usage_watts" not in found
    assert found["node_0/gpu_1_temperature_celsius"] == 60
    assert list(sampler.unsupported) == ["gpu_1_power_usage_watts"]


def test_a_window_that_ends_before_it_begins_is_refused(sampler):
    with pytest.raises(ValueError, match="ends too early"):
        sampler.window(2.0, 1.0)


def test_a_counter_that_was_reset_gives_no_rate():
    assert rates({"a": 5.0, "b": 1.0}, {"a": 3.0, "b": 2.0, "c": 9.0}, 2.0) == {"b": 0.5}


def test_processor_seconds_become_percentages():
    before = {"_cpu_total_s": 10.0, "_cpu_busy_s": 5.0, "_cpu_iowait_s": 0.0, "_process_cpu_s": 1}
    after = {"_cpu_total_s": 14.0, "_cpu_busy_s": 8.0, "_cpu_iowait_s": 1.0, "_process_cpu_s": 2.5}
    assert rates(before, after, 2.0) == {
        "cpu_utilization_percentage": 75.0,
        "cpu_iowait_percentage": 25.0,
        "process_cpu_percentage": 75.0,
        "process_cpu_share_percentage": 50.0,
    }


def test_nodes_are_merged_with_the_worst_of_memory_and_heat():
    merged = merge_nodes(
        [
            {"node_0/gpu_0_memory_free_megabytes": 5.0, "cpu_utilization_percentage": 99.0},
            {"node_1/gpu_3_memory_free_megabytes": 3.0, "node_1/cpu_utilization_percentage": 10.0},
        ]
    )
    assert merged["gpu_memory_free_megabytes"] == 3.0
    assert merged["cpu_utilization_percentage"] == 10.0
    heat = aggregates(
        {"node_0/gpu_0_temperature_celsius": 50, "node_0/gpu_1_temperature_celsius": 9}
    )
    assert heat == {"gpu_temperature_celsius": 50.0}


def test_the_thread_samples_by_itself_and_stops(no_gpu):
    sampler = SystemSampler(0.02)
    begin = time.monotonic()
    sampler.start()
    with pytest.raises(RuntimeError, match="already"):
        sampler.start()
    deadline = time.monotonic() + 10
    while len(sampler.series()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    sampler.stop()
    sampler.stop()
    assert len(sampler.series()) >= 3
    found = sampler.window(begin, time.monotonic())
    assert 0 <= found["node_0/cpu_utilization_percentage"] <= 100
    assert found["node_0/system_memory_available_megabytes"] > 0
    assert "gpu" in sampler.unsupported


def test_a_process_born_after_the_last_reading_counts_in_the_window(no_gpu):
    """Whatever ``metrics.interval_s``: a rank starts, works and ends between two readings."""
    sampler = SystemSampler(60.0, process_ids=[os.getpid()])
    begin = sampler.sample()
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", busy], check=True, timeout=60)
    end = time.monotonic()
    found = sampler.window(begin, end)
    assert found["process_cpu_percentage"] * (time.monotonic() - begin) / 100 >= 0.19


def test_a_window_right_after_the_start_has_rates(no_gpu):
    sampler = SystemSampler(60.0)
    now = time.monotonic()
    assert "node_0/cpu_utilization_percentage" in sampler.window(now, now)


def test_an_interval_of_zero_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"metrics\.interval_s=0"):
        SystemSampler(0)
