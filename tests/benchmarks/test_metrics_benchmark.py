"""The parts of ``benchmarks/metrics.py`` that need no GPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in [n for n in sys.modules if n.startswith("_metrics_")]:
        del sys.modules[name]


def test_a_part_goes_on_where_it_ended(module, tmp_path, capsys):
    store = module("_metrics_store").Store(tmp_path / "s.jsonl", "here")
    store.add("loader", "20 ms", slept_ms=20.0, found_ms=20.5, error=0.025, finding="input_bound")
    again = module("_metrics_store").Store(tmp_path / "s.jsonl", "there")
    assert again.has("loader", "20 ms")
    assert not again.has("loader", "60 ms")
    again.add("loader", "20 ms", slept_ms=20.0, found_ms=19.0, error=-0.05, finding="input_bound")
    assert [r["found_ms"] for r in again.of("loader")] == [19.0]
    assert "found_ms=20.5" in capsys.readouterr().out


def test_the_page_shows_what_was_measured_and_says_what_was_not(module, tmp_path):
    store = module("_metrics_store").Store(tmp_path / "s.jsonl", "2 processors")
    common = {"exposed_ms": 30.0, "without_ms": 9.0, "bound": 0.8, "finding": "communication_bound"}
    common["share"] = 0.429
    store.add("link", "free", wire_ms=None, **{**common, "step_ms": 40.0, "exposed_ms": 10.0})
    store.add("link", "100 Mbit/s", wire_ms=335.5, step_ms=70.0, **common)
    text = module("_metrics_report").markdown(store)
    row = next(line for line in text.splitlines() if line.startswith("| 100 Mbit/s"))
    # 30 ms more than over the free link, of which 10 ms were exposed there already
    assert "| 42.9% | 57.1% |" in row
    assert "2 processors, commit" in text
    assert text.count("Not measured.") == 7


def test_phases_lie_between_the_marking_kernels_of_the_timeline(module, tmp_path):
    gpu = module("_metrics_gpu")
    order = ["start", *(["dataloader_next", "forward", "backward", "step"] * gpu.PROFILED_STEPS)]
    begins_ms, now = [], 0.0
    for phase in order:
        now += {"start": 1.0, "dataloader_next": 0.5, "forward": 2.0, "backward": 4.0, "step": 0.0}[
            phase
        ]
        begins_ms.append(now)
    kernel = {"cat": "kernel", "dur": 1.0, "name": "at::native::spin_kernel(long)"}
    events = [{**kernel, "ts": b * 1e3} for b in begins_ms]
    events += [{**kernel, "ts": 5.0, "name": "gemm"}, {"ph": "M", "name": "process_name"}]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = gpu._phases_of(trace, order)
    assert found == pytest.approx({"forward": 2.0, "backward": 4.0, "step": 6.5})
    with pytest.raises(RuntimeError, match="21 marking kernels were seen of 22"):
        gpu._phases_of(trace, [*order, "forward"])


def test_a_confirmed_gain_is_held_against_the_bound(module, tmp_path, capsys):
    from perfsearch.core.journal import Journal
    from perfsearch.core.trial import Measurement, Purpose, Status, Trial

    measurement = Measurement([0.1] * 5, 1, phases_ms={"comm_exposed": 20.0, "optimizer": 5.0})
    evidence = {"with_everything_ms": 100.0, "detailed_step_ms": 100.0}
    measurement.bottleneck_evidence = evidence
    knobs = {"bucket_cap_mb": 25, "optimizer_implementation": "default"}
    first = Trial(0, knobs, Purpose.BASELINE, Status.OK, measurement, cost=0.1)
    better = Trial(1, {**knobs, "bucket_cap_mb": 8}, Purpose.SEARCH, Status.OK, None, cost=0.09)
    for name, low in (("holds", 1.2), ("broken", 1.3)):
        (tmp_path / name).mkdir()
        journal = Journal(tmp_path / name / "journal.jsonl", {})
        for trial in (first, better):
            journal.append("finished", trial=trial.to_json())
        journal.append("confirmed", blocks=3, intervals={"1": {"low": low}})
        journal.close()
    store = module("_metrics_store").Store(tmp_path / "s.jsonl", "")
    module("_metrics_bounds").check(store, [tmp_path / "holds", tmp_path / "broken"])
    found = store.of("bound")
    assert [r["bound"] for r in found] == pytest.approx([0.25, 0.25])
    assert [r["holds"] for r in found] == [True, False]
