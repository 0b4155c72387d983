import json

import pytest

from perfsearch.metrics.throughput import device_time, union_length


def test_overlapping_spans_count_once():
    assert union_length([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == pytest.approx(5.0)
    assert union_length([]) == 0


def event(name, begin_us, duration_us, category="kernel"):
    return {"name": name, "ts": begin_us, "dur": duration_us, "cat": category, "ph": "X"}


def test_busy_communicating_and_exposed_time(tmp_path):
    trace = tmp_path / "trace.json"
    events = [
        event("gemm", 0, 4000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3000, 3000),
        event("Memcpy HtoD", 8000, 1000, "gpu_memcpy"),
        event("Optimizer.step", 0, 10_000, "gpu_user_annotation"),
        event("aten::mm", 0, 10_000, "cpu_op"),
        {"name": "process_name", "ph": "M"},
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    found = device_time(trace).per_step(2)
    assert (found.busy_ms, found.communication_ms, found.exposed_ms) == (3.5, 1.5, 1.0)
    assert found.kernels == 1


def test_what_was_before_the_first_read_is_left_out(tmp_path):
    trace = tmp_path / "trace.json"
    events = [
        event("ncclDevKernel_AllReduce_Max_f64", 0, 400_000),
        event("Memcpy DtoH", 400_000, 2, "gpu_memcpy"),
        event("gemm", 500_000, 4000),
        event("Memcpy DtoH", 504_000, 1000, "gpu_memcpy"),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    assert device_time(trace, after_read=True).busy_ms == 5.0
    assert device_time(trace).busy_ms > 400
    trace.write_text(json.dumps({"traceEvents": events[2:3]}))
    assert device_time(trace, after_read=True).busy_ms == 4.0


def test_a_trace_without_a_device_says_nothing(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 5, "cpu_op")]}))
    assert device_time(trace) is None
