"""What the simulator charges, case by case; among them what FlexFlow's simulator got wrong."""

import itertools
import json
import random
from dataclasses import replace

import pytest
from support.soap_graphs import (
    batch_input,
    cat,
    cost_of,
    free_host_cost_of,
    linear,
    machine,
    norm,
    on,
    random_graph,
    table,
    uneven_machine,
)

from perfsearch.soap.graph import Graph, Operator, Role, Same, Stage, Whole
from perfsearch.soap.parts import layout_of, owned_keys, shares_statistics
from perfsearch.soap.plan import data_parallel, part_rectangles
from perfsearch.soap.simulator.chain import ChainOptions
from perfsearch.soap.simulator.machine import Shard, at_size, shards_of
from perfsearch.soap.simulator.problem import bucket_bytes, sync_us
from perfsearch.soap.simulator.simulator import Simulator
from perfsearch.soap.simulator.timeline import Task, busy_lines, chrome_trace

X = batch_input("x", (8, 16))
FIRST = linear("first", X, 32)
SECOND = linear("second", FIRST, 8)
COMPUTING = ("forward", "backward", "optimizer", "copy")
PAIR = Graph((X, FIRST, SECOND), frozenset({"x"}), "second", 8)
IDS = batch_input("ids", (8, 1), "int64")
TABLE = table("table", IDS, 1000, 16)


def syncs(operator, degrees):
    owned = owned_keys(Graph((X, operator), frozenset({"x"}), operator.name, 8))[operator.name]
    return layout_of(operator, degrees, owned, 0.0).syncs


def test_only_the_shard_that_is_replicated_is_summed():
    whole = 4 * (32 * 16 + 32)
    assert syncs(FIRST, (4, 1)) == (((0, 1, 2, 3), whole),)
    assert syncs(FIRST, (1, 4)) == ()
    assert syncs(FIRST, (2, 2)) == (((0, 2), whole // 2), ((1, 3), whole // 2))


def test_an_embeddings_gradient_has_the_tables_size():
    owned = frozenset({"table.weight"})
    assert layout_of(TABLE, (4, 1), owned, 0.0).syncs == (((0, 1, 2, 3), 4 * 1000 * 16),)


def test_a_table_of_one_device_is_updated_by_rows_where_the_optimizer_allows_it():
    owned = frozenset({"table.weight"})
    alone = layout_of(TABLE, (1, 1), owned, 0.0, updates_rows=True)
    assert alone.by_rows and alone.weight_bytes == (0,)
    assert not layout_of(TABLE, (1, 1), owned, 0.0).by_rows
    assert not layout_of(TABLE, (2, 1), owned, 0.0, updates_rows=True).by_rows
    assert layout_of(TABLE, (1, 2), owned, 0.0, updates_rows=True).by_rows


def transfers(plan, hardware=None):
    simulator = Simulator(PAIR, hardware or machine(), cost_of, extra=(plan,))
    tasks = simulator.timeline(plan)
    return {t.device: t.end_us - t.begin_us for t in tasks if t.kind == "transfer"}


def test_a_linear_layer_split_over_outputs_needs_its_whole_input_everywhere():
    plan = {"first": on((4, 1), 0, 1, 2, 3), "second": on((1, 4), 0, 1, 2, 3)}
    hardware = machine()
    found = transfers(plan, hardware)
    simulator = Simulator(PAIR, hardware, cost_of)
    gathered = {**plan, "second": on((4, 1), 0, 1, 2, 3)}
    assert transfers(gathered) == {}
    whole_us = 4 * 8 * 32 * 0.75 * 1e6 / (0.01 * 2**30)
    assert set(found) == {0, 1, 2, 3}
    assert found[0] > whole_us
    assert simulator.estimate(plan).seconds > simulator.estimate(gathered).seconds


def test_a_disturbed_measurement_of_a_small_transfer_makes_no_larger_one_free():
    x = batch_input("x", (8, 16))
    sources = [linear(f"source_{i}", x, 512) for i in range(4)]
    joined = cat("joined", sources)
    graph = Graph((x, *sources, joined), frozenset({"x"}), "joined", 8)
    plan = {**{s.name: on((1, 1), 0) for s in sources}, "joined": on((1, 1), 1)}
    disturbed = machine()
    curve = disturbed.within["exchange"][1]
    smallest = min(curve)
    curve[smallest] = 10 * curve[2**14]

    def moved_us(hardware):
        tasks = Simulator(graph, hardware, cost_of, extra=(plan,)).timeline(plan)
        return sum(t.end_us - t.begin_us for t in tasks if t.kind == "transfer")

    # what is not known to be latency is at least one part's time
    assert moved_us(disturbed) >= 0.9 * moved_us(machine()) / len(sources) > 0


def test_what_stays_on_its_device_is_not_moved():
    assert transfers({"first": on((2, 1), 1, 3), "second": on((2, 1), 1, 3)}) == {}
    moved = transfers({"first": on((2, 1), 1, 3), "second": on((2, 1), 3, 1)})
    assert set(moved) == {1, 3}


def test_times_have_the_units_that_their_names_say():
    hardware = machine()
    exact = sync_us(hardware, (0, 1, 2, 3), 1 << 20, bucket=1)
    by_hand_us = 3 * 4 + 2 * 0.75 * (1 << 20) * 1e6 / (0.01 * 2**30)
    assert exact == pytest.approx(by_hand_us, rel=0.01)


def test_sums_over_nodes_take_the_links_between_them():
    hardware = machine(per_node=2)
    assert sync_us(hardware, (0, 1), 1 << 20, 1) < sync_us(hardware, (1, 2), 1 << 20, 1)


def test_gradients_that_fill_no_bucket_pay_one_latency_together():
    hardware, whole = machine(), 4 * (32 * 16 + 32) + 4 * (8 * 32 + 8)
    assert bucket_bytes(PAIR, hardware) == whole
    assert bucket_bytes(PAIR, replace(hardware, bucket_mib=2048 / 2**20)) == 4 * (32 + 8 * 32 + 8)
    shares = [
        sync_us(hardware, (0, 1), size, bucket=whole) for size in (whole // 4, 3 * whole // 4)
    ]
    assert sum(shares) == pytest.approx(sync_us(hardware, (0, 1), whole, bucket=1))


def test_sums_within_an_operator_take_their_time():
    """Those of a batch norm, both ways, and the number of a loss's targets."""
    normal = norm("normal", FIRST)
    stage = Stage("class_loss", (8,), ((Same(0), Whole(32)),), {"mean": True})
    loss = Operator(
        "loss", "class_loss", ("normal",), ((8, 32),), (8,), "float32", (Role.SAMPLE,), (), (stage,)
    )
    graph = Graph((X, FIRST, normal, loss), frozenset({"x"}), "loss", 8)
    hardware = machine(2)
    curve = hardware.within["all_reduce"][2]

    def times(operator, degrees, devices):
        plan = data_parallel(graph, range(2)) | {operator: on(degrees, *devices)}
        found = Simulator(graph, hardware, free_host_cost_of).by_operator(plan)[operator]
        parts = part_rectangles(graph.by_name[operator], plan[operator])
        cost = free_host_cost_of(graph.by_name[operator], parts[0], (True,))
        own = (found.forward_ms - cost.forward_us / 1e3, found.backward_ms - cost.backward_us / 1e3)
        return [pytest.approx(1e3 * ms, abs=2e-2) for ms in own]

    assert times("normal", (2, 1), (0, 1)) == [
        at_size(curve, 2 * 32 * 8),
        at_size(curve, 2 * 32 * 4),
    ]
    assert times("normal", (1, 2), (0, 1)) == [0, 0]
    assert times("normal", (1, 1), (1,)) == [0, 0]
    assert times("loss", (2,), (0, 1)) == [at_size(curve, 4), 0]
    assert times("loss", (1,), (0,)) == [0, 0]


def test_a_batch_norm_that_shares_its_statistics_is_timed_apart():
    normal = norm("normal", FIRST)
    shared = Shard(normal, ((0, 4), (0, 32)), (True,))
    unshared = Shard(normal, ((0, 8), (0, 16)), (True,))
    assert shares_statistics(shared.operator, shared.part)
    assert not shares_statistics(unshared.operator, unshared.part)
    whole_of_a_smaller_one = norm("normal", linear("first", batch_input("x", (4, 16)), 32))
    assert shared.key != Shard(whole_of_a_smaller_one, ((0, 4), (0, 32)), (True,)).key


def test_a_layer_whose_weights_are_frozen_is_timed_apart():
    """Its backward pass has no gradient of theirs to compute."""
    weight, bias = SECOND.parameters
    frozen = replace(SECOND, parameters=(replace(weight, trained=False), bias))
    shards = [Shard(operator, operator.whole, (True,)) for operator in (SECOND, frozen)]
    assert shards[0].key != shards[1].key
    graph = Graph((X, FIRST, SECOND, replace(frozen, name="third")), frozenset({"x"}), "third", 8)
    keys = {shard.key for shard in shards_of(graph, 1)}
    assert {shard.key for shard in shards} < keys


def test_tasks_of_one_timeline_never_overlap():
    graph = random_graph(random.Random(11), count=8)
    simulator = Simulator(graph, machine(), cost_of)
    plan = simulator.drift(data_parallel(graph, range(4)), 9, seed=1)
    tasks = simulator.timeline(plan)
    lanes = {}
    for task in tasks:
        kind = "compute" if task.kind in COMPUTING else task.kind
        kind = "link" if kind.startswith("transfer") else kind
        lanes.setdefault((task.device, kind), []).append((task.begin_us, task.end_us))
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(lane))
    end = max(task.end_us for task in tasks)
    assert end == pytest.approx(1e6 * simulator.estimate(plan).seconds)
    trace = json.loads(json.dumps(chrome_trace(tasks)))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(tasks)
    assert len(busy_lines(tasks, 4)) == 4
    # beside it the measured one, a process below each device's
    timed = [Task("forward", tasks[0].name, 1, 2.5, 4.0), Task("communication", "a", 1, 4.0, 5.0)]
    both = json.loads(json.dumps(chrome_trace(tasks, timed)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in both if e["name"] == "process_name"}
    assert names[2] == "device 1" and names[3] == "device 1, measured one thing at a time"
    assert len(names) == 5
    shown = [(e["pid"], e["cat"], e["ts"], e["dur"]) for e in both if e["ph"] == "X"]
    assert (3, "forward", 2.5, 1.5) in shown and (3, "communication", 4.0, 1.0) in shown
    assert len(shown) == len(tasks) + 2


def test_a_search_is_the_same_again_and_never_ends_worse_than_its_start():
    graph = random_graph(random.Random(3), count=7)
    start = data_parallel(graph, range(4))
    runs = [
        Simulator(graph, machine(), cost_of).search(start, 3000, ChainOptions(), seed=5)
        for _ in range(2)
    ]
    assert runs[0].plans == runs[1].plans
    assert runs[0].series == runs[1].series
    other = Simulator(graph, machine(), cost_of).search(start, 3000, ChainOptions(), seed=6)
    assert other.series != runs[0].series
    simulator = Simulator(graph, machine(), cost_of)
    times = [seconds for seconds, _ in runs[0].plans]
    assert times == sorted(times)
    assert times[0] <= simulator.estimate(start).seconds
    for seconds, plan in runs[0].plans[:5]:
        assert simulator.estimate(plan).seconds == seconds


def test_a_search_keeps_to_the_memory_that_there_is():
    graph = random_graph(random.Random(3), count=7)
    start = data_parallel(graph, range(4))
    roomy = Simulator(graph, machine(), cost_of)
    limit = roomy.estimate(start).peak_gib * 1.2
    tight = Simulator(graph, replace(machine(), memory_gib=limit), cost_of)
    found = tight.search(start, 3000, ChainOptions(), seed=0)
    assert found.infeasible > 0
    assert all(roomy.estimate(plan).peak_gib <= limit for _, plan in found.plans)


def test_a_start_beyond_memory_is_left_for_what_fits():
    graph = random_graph(random.Random(3), count=7)
    start = data_parallel(graph, range(4))
    roomy = Simulator(graph, machine(), cost_of)
    limit = roomy.estimate(start).peak_gib * 0.9
    tight = Simulator(graph, replace(machine(), memory_gib=limit), cost_of)
    assert not tight.estimate(start).fits
    found = tight.search(start, 3000, ChainOptions(), seed=0)
    assert found.plans
    assert all(roomy.estimate(plan).peak_gib <= limit for _, plan in found.plans)


def test_only_dimensions_of_the_chosen_kinds_are_split():
    simulator = Simulator(PAIR, machine(), cost_of, frozenset({Role.SAMPLE}))
    assert {c.degrees[1] for c in simulator.problem.configurations(0)} == {1}


def test_operators_that_may_have_less_than_their_class_keep_to_it():
    only = (on((1, 1), 2),)
    simulator = Simulator(PAIR, machine(), cost_of, allowed={"first": only})
    start = {**data_parallel(PAIR, range(4)), "first": only[0]}
    found = simulator.search(start, 500, ChainOptions(alpha=0.0), seed=0)
    assert {plan["first"] for _, plan in found.plans} == set(only)
    assert len({plan["second"] for _, plan in found.plans}) > 1


def test_a_search_gives_slow_devices_behind_slow_links_nothing():
    graph = Graph((X, FIRST, SECOND), frozenset({"x"}), "second", 8)
    hardware = replace(uneven_machine(), speeds=(1.0, 1.0, 0.01, 0.01))
    start = data_parallel(graph, range(4))
    simulator = Simulator(graph, hardware, cost_of)
    found = simulator.search(start, 2000, ChainOptions(), seed=0)
    _, best = found.plans[0]
    assert {device for chosen in best.values() for device in chosen.devices} <= {0, 1}
    alone = {name: on((1, 1), 2) for name in start}
    fast = {name: on((1, 1), 0) for name in start}
    passes = [
        sum(t.forward_ms for t in simulator.by_operator(plan).values()) for plan in (alone, fast)
    ]
    assert passes[0] == pytest.approx(100 * passes[1], rel=1e-3)


def test_a_transfer_goes_by_the_level_of_its_links():
    hardware = uneven_machine()
    times = [sync_us(hardware, pair, 1 << 20, 1) for pair in ((0, 1), (1, 2), (2, 3))]
    assert times == sorted(times) and len(set(times)) == 3
    assert sync_us(hardware, (0, 1, 3), 1 << 20, 1) > times[2]
