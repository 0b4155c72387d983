"""Plans that people write by hand."""

from support.soap_graphs import batch_input, cat, cost_of, linear, machine, on, table

from perfsearch.soap.graph import Graph, Role
from perfsearch.soap.named import named_plans, within
from perfsearch.soap.plan import data_parallel, validate_plan
from perfsearch.soap.simulator.problem import Problem

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
    assert tensor["deep"] == tensor["top"] == on((1, 2), 0, 1)
    by_device = plans["tables by device"]
    # the two large ones apart, the small ones where less is
    assert by_device["table_1"] == on((1, 1), 0)
    assert by_device["table_2"] == by_device["table_3"] == on((1, 1), 1)
    assert by_device["table_0"].devices == (1,) or by_device["table_0"].devices == (0,)
    assert by_device["top"] == plans["data parallel"]["top"]


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
