"""Plans that people write by hand."""

from dataclasses import replace

import pytest
from support.soap_graphs import batch_input, cat, cost_of, linear, machine, on, table
from support.soap_public import make_public

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.graph import Graph, Role
from perfsearch.soap.named import named_plans, within
from perfsearch.soap.plan import (
    Pattern,
    data_parallel,
    pattern,
    placements,
    redistributions,
    tiles,
    validate_plan,
)
from perfsearch.soap.simulator.problem import Problem
from perfsearch.soap.simulator.simulator import Simulator

X = batch_input("x", (8, 16))
IDS = batch_input("ids", (8, 1), "int64")
DEEP = linear("deep", X, 16)
TABLES = [table(f"table_{i}", IDS, rows, 8) for i, rows in enumerate((10, 500, 400, 90))]
JOINED = cat("joined", [DEEP, *TABLES])
TOP = linear("top", JOINED, 8)
GRAPH = Graph((X, IDS, DEEP, *TABLES, JOINED, TOP), frozenset({"x", "ids"}), "top", 8)


def test_each_fits_the_model_and_is_what_its_name_says():
    plans = named_plans(GRAPH, 2)
    for plan in plans.values():
        validate_plan(GRAPH, plan, 2)
    assert plans["data parallel"] == data_parallel(GRAPH, range(2))
    assert {c.devices for c in plans["whole"].values()} == {(0,)}
    tensor = plans["tensor parallel"]
    # what is put together is read where it is, so that the top one shares its sums
    assert tensor["deep"] == on((1, 2), 0, 1)
    by_device = plans["tables by device"]
    # the two large ones apart, the small ones where less is
    assert by_device["table_1"] == on((1, 1), 0)
    assert by_device["table_2"] == by_device["table_3"] == on((1, 1), 1)
    assert by_device["table_0"].devices == (1,) or by_device["table_0"].devices == (0,)
    assert by_device["top"] == plans["data parallel"]["top"]


def test_megatrons_pair_moves_nothing_between_its_layers():
    first, second = linear("first", X, 32), None
    second = linear("second", first, 16)
    third = linear("third", second, 8)
    graph = Graph((X, first, second, third), frozenset({"x"}), "third", 8)
    plan = named_plans(graph, 4)["tensor parallel"]
    assert plan["first"] == plan["third"] == on((1, 4), 0, 1, 2, 3)
    assert plan["second"] == replace(on((4, 1), 0, 1, 2, 3), sums=4)
    placed = placements(graph, plan, 4)
    moved = {r.producer: pattern(r) for r in redistributions(graph, placed)}
    assert moved == {"first": Pattern.LOCAL, "second": Pattern.ALL_GATHER}
    # each has a quarter of both weights
    sizes = {key: tile.rectangle for key, tile in tiles(graph, placed[1]).items()}
    assert sizes["first.weight"] == ((8, 16), (0, 16))
    assert sizes["second.weight"] == ((0, 16), (8, 16))
    assert sizes["second.bias"] == ((0, 16),)
    # and what the second one adds up and deals out is in its own time
    simulator = Simulator(graph, machine(), cost_of, extra=(plan,))
    apart = {**plan, "second": on((1, 4), 0, 1, 2, 3)}
    assert simulator.by_operator(plan)["second"].communication_ms < (
        simulator.by_operator(apart)["second"].communication_ms
    )
    assert simulator.by_operator(plan)["second"].forward_ms > (
        simulator.by_operator(apart)["second"].forward_ms
    )


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_pairs_of_public_models_move_nothing_between_their_layers(name):
    graph = capture(*make_public(name)).graph
    plan = named_plans(graph, 2)["tensor parallel"]
    validate_plan(graph, plan, 2)
    second = [n for n, chosen in plan.items() if chosen.sums == 2]
    assert second == {"gpt2": ["blocks.0.c_out.addmm_3", "blocks.1.c_out.addmm_7"]}.get(
        name, ["feed.2"]
    )
    placed = placements(graph, plan, 2)
    for each in redistributions(graph, placed):
        if set(second) & {consumer for consumer, _ in each.consumers}:
            assert pattern(each) is Pattern.LOCAL


def test_layers_by_device_go_on_in_the_programs_order_with_like_work():
    made = [X]
    for number in range(8):
        made.append(linear(f"linear_{number}", made[-1], 16))
    graph = Graph(tuple(made), frozenset({"x"}), made[-1].name, 8)
    plan = named_plans(graph, 4)["layers by device"]
    assert [plan[o.name].devices[0] for o in graph.planned] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_kind_of_dimension_that_may_not_be_split_is_not():
    plan = named_plans(GRAPH, 2, frozenset({Role.SAMPLE}))
    # which makes it data parallelism, so that it is not listed twice
    assert "tensor parallel" not in plan
    alone = named_plans(GRAPH, 1)
    assert list(alone) == ["data parallel"]


def test_pins_are_kept():
    plan = named_plans(GRAPH, 2)["whole"]
    pinned = (on((2, 1), 0, 1),)
    found = within(plan, {"top": pinned}, plan)
    assert found == {**plan, "top": pinned[0]}


def test_each_operators_own_best_counts_its_gradients_sums():
    problem = Problem(GRAPH, machine(devices=2), cost_of)
    best = problem.own_best()
    validate_plan(GRAPH, best, 2)
    # a large table over samples would have its whole gradient summed
    assert best["table_1"].degrees != (2, 1)
