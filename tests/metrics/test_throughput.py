from __future__ import annotations

import math

import pytest

from perfsearch.metrics.throughput import (
    model_flops_utilization,
    peak_flops,
    percentile,
    step_time_summary,
)


def test_percentiles_interpolate_between_steps():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.9) == pytest.approx(4.6)
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_summary_is_in_milliseconds_with_its_spread():
    summary = step_time_summary([0.1, 0.2, 0.3])
    assert summary["mean_ms"] == pytest.approx(200)
    assert summary["p50_ms"] == pytest.approx(200)
    assert summary["p99_ms"] == pytest.approx(298)
    assert summary["cv"] == pytest.approx(0.5)


def test_what_is_not_there_is_not_made_up():
    assert step_time_summary([]) == {}
    assert step_time_summary([math.nan]) == {}
    assert "cv" not in step_time_summary([0.1])


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("AMD EPYC", "bf16", None),
    ],
)
def test_peaks_are_by_device_and_precision(name, precision, expected):
    assert peak_flops(name, precision) == expected


def test_utilisation_of_the_peak_counts_all_devices():
    assert model_flops_utilization(4e12, 2.0, 4, 1e12) == 0.5
