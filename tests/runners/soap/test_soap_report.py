"""Simulated against measured times of single operators."""

import csv
from dataclasses import replace

import pytest
from support.soap_graphs import batch_input, linear, on

from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.runners.soap import report
from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import OperatorTime

X = batch_input("x", (8, 16))
FIRST = linear("first", X, 32)
SECOND = linear("second", FIRST, 8)
GRAPH = Graph((X, FIRST, SECOND), frozenset({"x"}), "second", 8)
PLANS = {
    "split": {"first": on((2, 1), 0, 1), "second": on((1, 2), 1, 0)},
    "one": {"first": on((1, 1), 0), "second": on((1, 1), 0)},
}
SIMULATED = {"first": OperatorTime(1.0, 2.0, 0.5), "second": OperatorTime(0.1, 0.2, 0.0)}


def trial(number, plan, times, status=Status.OK):
    told = {name: OperatorTime(*each).to_json() for name, each in times.items()}
    measured = Measurement([0.01], 8, environment={"operators": told} if told else {})
    return Trial(number, {"plan": plan}, Purpose.SEARCH, status, measured)


def compared(*trials):
    return report.compare_operators(
        trials, GRAPH, lambda c: PLANS[c["plan"]], lambda plan: SIMULATED, 0.25
    )


def test_there_is_a_row_for_each_operator_of_each_strategy(tmp_path):
    rows = compared(
        trial(0, "split", {"first": (2.0, 2.0, 1.0), "second": (0.1, 0.1, 0.0)}),
        trial(1, "one", {"first": (1.0, 1.0, 0.0), "second": (0.0, 0.0, 0.0)}),
        trial(2, "split", {"first": (4.0, 2.0, 2.0), "second": (0.1, 0.1, 0.0)}),
    )
    path = tmp_path / "new" / "table.csv"
    report.write_operators_csv(rows, path)
    with path.open() as file:
        found = list(csv.DictReader(file))
    assert [(r["trials"], r["operator"]) for r in found] == [
        ("0 2", "first"),
        ("0 2", "second"),
        ("1", "first"),
        ("1", "second"),
    ]
    first = found[0]
    assert (first["kind"], first["dims"], first["devices"]) == ("linear", "2x1", "0 1")
    assert (found[1]["dims"], found[1]["devices"]) == ("1x2", "1 0")
    assert float(first["simulated_forward_ms"]) == 1.0
    assert float(first["measured_forward_ms"]) == 3.0  # the median of two
    assert float(first["measured_communication_ms"]) == 1.5
    assert float(first["simulated_ms"]) == 3.5
    assert float(first["measured_ms"]) == 6.5
    assert float(first["error"]) == pytest.approx(3.5 / 6.5 - 1, abs=1e-4)
    assert float(first["simulated_overhead_ms"]) == 0.25
    assert found[3]["error"] == ""  # nothing was measured that it could be a share of


def test_trials_that_failed_or_were_not_timed_have_no_row():
    times = {"first": (1.0, 1.0, 0.0), "second": (1.0, 1.0, 0.0)}
    assert compared(trial(0, "one", {}), trial(1, "split", times, Status.DIVERGED)) == []
    assert report.worst_lines([]) == []


def test_the_worst_are_those_that_put_a_step_off_most():
    rows = compared(trial(0, "one", {"first": (3.0, 6.0, 0.5), "second": (0.1, 0.01, 0.0)}))
    lines = report.worst_lines(rows * 2)
    assert len(lines) == 1 + 3
    assert "[first] simulated 3.500 for 9.500 measured (-63%)" in lines[1]
    assert "backward 2.000 for 6.000" in lines[1]
    assert "[second]" in lines[3]


def test_the_baseline_says_what_it_leaves_on_one_device():
    whole = replace(SECOND, roles=(None, None), kind="whole", source="model.py:7")
    half = Graph((X, FIRST, whole), frozenset({"x"}), "second", 8)
    share = whole.flops / (FIRST.flops + whole.flops)
    line = report.baseline_line(half, 2)
    assert line.startswith(
        f"the baseline is not data parallelism: {share:.1%} of the forward FLOPs"
    )
    assert f"{share:.1%} from second (whole) at model.py:7 on" in line
    assert "runner=ddp" in line
    assert report.baseline_line(half, 1) is None
    assert report.baseline_line(GRAPH, 2) is None
    little = Graph(
        (X, FIRST, replace(whole, flops=0.01 * FIRST.flops)), frozenset({"x"}), "second", 8
    )
    assert report.baseline_line(little, 4).startswith(
        "the baseline is data parallelism but for 1.0%"
    )
