"""Each operator of a strategy is timed by itself, in steps that are none of the scored ones."""

import random
import statistics

import pytest
from support.soap_graphs import batch_input, cost_of, linear, machine, on, random_graph
from support.soap_timed_ranks import launch

from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import OperatorTime, data_parallel
from perfsearch.soap.simulator.simulator import Simulator

LOOSELY = 20.0
"""Times of small steps on a busy machine; a wrong unit is off by far more."""


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["dlrm", "gpt"])
def test_operators_are_timed_after_the_scored_steps_and_nothing_else_changes(workload, tmp_path):
    operators, trials = launch(tmp_path, workload)
    assert len(trials) == 3
    for plain, untimed, timed, doing in trials:
        assert plain["status"] == timed["status"] == "ok"
        assert untimed == 0
        assert doing == ["profile"]  # and neither "build" nor "train"
        assert "operators" not in plain["environment"]
        assert timed["agreed"]["first_losses"] == plain["agreed"]["first_losses"]
        assert len(timed["agreed"]["step_seconds"]) == 4
        assert timed["agreed"]["detail_seconds"] > 0
        found = timed["environment"]["operators"]
        assert sorted(found) == sorted(operators)
        times = {name: OperatorTime.from_json(record) for name, record in found.items()}
        assert all(time.forward_ms > 0 for time in times.values())
        assert any(time.communication_ms > 0 for time in times.values())
        spans = timed["environment"]["spans"]
        assert {device for device, *_ in spans} == {0, 1}
        assert {name for _, name, *_ in spans} <= set(operators)
        assert {column for _, _, column, *_ in spans} == {0, 1, 2}
        for device in range(2):
            own = [(begin, end) for at, _, _, begin, end in spans if at == device]
            assert own == sorted(own) and all(begin <= end for begin, end in own)
        step_ms = 1e3 * statistics.median(timed["agreed"]["step_seconds"])
        whole_ms = sum(time.whole_ms for time in times.values())
        assert step_ms / LOOSELY < whole_ms < step_ms * LOOSELY


X = batch_input("x", (8, 16))
FIRST = linear("first", X, 32)
SECOND = linear("second", FIRST, 8)
PAIR = Graph((X, FIRST, SECOND), frozenset({"x"}), "second", 8)


def test_transfers_belong_to_who_reads_and_sums_to_who_has_the_weights():
    gathered = {"first": on((4, 1), 0, 1, 2, 3), "second": on((1, 4), 0, 1, 2, 3)}
    found = Simulator(PAIR, machine(), cost_of).by_operator(gathered)
    assert found["first"].communication_ms > 0  # the sum of its weights' gradients
    assert found["second"].communication_ms > 0  # its input, and the gradient of that
    alone = Simulator(PAIR, machine(), cost_of).by_operator(
        {"first": on((1, 4), 0, 1, 2, 3), "second": on((1, 1), 0)}
    )
    assert alone["first"].communication_ms == 0
    assert alone["second"].communication_ms > 0
    assert alone["second"].forward_ms > found["second"].forward_ms


def test_on_one_device_the_operators_and_the_optimizer_are_the_step():
    graph = random_graph(random.Random(5), count=6)
    hardware = machine(devices=1)
    simulator = Simulator(graph, hardware, cost_of)
    plan = data_parallel(graph, [0])
    found = simulator.by_operator(plan)
    optimizer = [t for t in simulator.timeline(plan) if t.kind == "optimizer"]
    rest_ms = sum(t.end_us - t.begin_us for t in optimizer) / 1e3 + hardware.step_us / 1e3
    whole_ms = sum(time.whole_ms for time in found.values()) + rest_ms
    assert 1e3 * simulator.estimate(plan).seconds == pytest.approx(whole_ms, rel=0.05)


def test_what_was_calibrated_by_whole_steps_is_no_operators_own_time():
    plan = {"first": on((4, 1), 0, 1, 2, 3), "second": on((1, 4), 0, 1, 2, 3)}
    own = Simulator(PAIR, machine(), cost_of)
    beside = Simulator(PAIR, machine(task_us=50.0), cost_of)
    assert beside.by_operator(plan) == own.by_operator(plan)
    assert beside.estimate(plan).seconds > own.estimate(plan).seconds


def test_the_slowest_device_counts():
    uneven = {"first": on((3, 1), 0, 1, 2), "second": on((1, 1), 3)}
    simulator = Simulator(PAIR, machine(), cost_of, extra=(uneven,))
    first = simulator.by_operator(uneven)["first"]
    forward_us = [
        t.end_us - t.begin_us
        for t in simulator.timeline(uneven)
        if (t.kind, t.name) == ("forward", "first")
    ]
    assert len(set(forward_us)) > 1
    assert first.forward_ms == pytest.approx(max(forward_us) / 1e3)
