import random
import re
from dataclasses import replace

import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from support import soap_models
from support.soap_graphs import cost_of, machine, on, random_graph, random_plan, uneven_machine

from perfsearch.soap import formats
from perfsearch.soap.capture.capture import capture
from perfsearch.soap.graph import Graph, dump_graph, parse_graph
from perfsearch.soap.parts import gradients
from perfsearch.soap.plan import OperatorConfiguration, PlanError, choices, data_parallel, sums_of
from perfsearch.soap.simulator.machine import (
    CostError,
    CostTable,
    Machine,
    MachineError,
    Shard,
    ShardCost,
    at_members,
    at_size,
)
from perfsearch.soap.simulator.problem import Problem

GRAPH = random_graph(random.Random(4))


def test_a_plan_is_read_as_it_was_written():
    problem = Problem(GRAPH, machine(), cost_of)
    for seed in range(5):
        plan = random_plan(problem, random.Random(seed))
        assert formats.parse_plan(formats.dump_plan(GRAPH, plan, 4), GRAPH) == plan


def named(*names):
    return Graph(
        tuple(
            replace(o, name=name, inputs=()) for o, name in zip(GRAPH.planned, names, strict=False)
        ),
        frozenset(),
        names[-1],
        GRAPH.batch,
    )


def test_names_that_look_like_numbers_stay_names():
    names = ("0.1", "0.10", "0_2", "02", "yes", "a: b", "null")
    graph = named(*names)
    plan = {
        o.name: OperatorConfiguration((1,) * len(o.shape), (place,))
        for place, o in enumerate(graph.planned)
    }
    text = formats.dump_plan(graph, plan, 8)
    assert formats.parse_plan(text, graph) == plan
    # nor does another reader mistake them
    assert tuple(yaml.safe_load(text)["operators"]) == names
    bare = text.replace('"0.10"', "0.10").replace('"0_2"', "0_2")  # as older versions wrote them
    assert formats.parse_plan(bare, graph) == plan


def test_an_operator_twice_is_refused():
    text = formats.dump_plan(GRAPH, data_parallel(GRAPH, range(2)), 2)
    name = GRAPH.planned[-1].name
    line = next(ln for ln in text.splitlines() if ln.strip().startswith(f"{name}:"))
    with pytest.raises(PlanError, match=f"operator {name}.*second time"):
        formats.parse_plan(f"{text}{line}\n", GRAPH)


def test_only_operators_of_plans_are_named_as_near_ones():
    text = formats.dump_plan(GRAPH, data_parallel(GRAPH, range(2)), 2)
    input_name = next(iter(GRAPH.inputs))
    with pytest.raises(PlanError) as error:
        formats.parse_plan(text + f"  {input_name}: {{degrees: [1], devices: [0]}}\n", GRAPH)
    assert f"operator {input_name}" in str(error.value)
    assert input_name not in str(error.value).partition("planned")[2]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "plan").write_bytes(b"schema: \xb7")
    with pytest.raises(PlanError, match="cannot be read as text"):
        formats.read_plan(tmp_path / "plan", GRAPH, 2)


def test_the_table_is_flexflows():
    plan = data_parallel(GRAPH, range(2))
    name = GRAPH.planned[0].name
    first = formats.plan_table(GRAPH, plan)[0]
    assert first == f"[{name}] num_dims(2) dims[2,1] device_ids[0,1]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.replace("schema: 1", "schema: 7"), ["schema", "7"]),
        (lambda t: t.replace("end:", "ende:"), ["ende", "end"]),
        (lambda t: t.replace("degrees: [2, 1]", "degrees: [3, 1]", 1), ["parts", "operator"]),
        (lambda t: t.replace("devices: [0, 1]", "devices: [0, 9]", 1), ["device 9"]),
        (lambda t: t.replace("degrees", "degree", 1), ["degrees"]),
        (lambda t: t + "  - x\n ]", ["not a strategy"]),
    ],
)
def test_what_does_not_fit_is_refused_by_operator(change, words):
    text = formats.dump_plan(GRAPH, data_parallel(GRAPH, range(2)), 2)
    with pytest.raises(PlanError) as error:
        formats.parse_plan(change(text), GRAPH)
    for word in words:
        assert word in str(error.value)


def flexflow_text(plan, names=None):
    lines = [str(len(plan))]
    for place, (name, chosen) in enumerate(plan.items()):
        degrees = list(reversed(chosen.degrees))
        words = [names[place] if names else name, 0, len(degrees)]
        lines += [str(w) for w in words] + ["\t".join(map(str, degrees))]
        lines += [str(len(chosen.devices)), "\t".join(map(str, chosen.devices))]
    return "\n".join(lines) + "\n"


def test_flexflows_text_is_read_innermost_dimension_first():
    first = GRAPH.planned[0].name
    plan = {**data_parallel(GRAPH, range(4)), first: on((1, 4), 3, 1, 0, 2)}
    text = flexflow_text(plan)
    assert formats.is_flexflow(text)
    assert not formats.is_flexflow(formats.dump_plan(GRAPH, plan, 4))
    assert formats.parse_flexflow(text, GRAPH, 4) == plan
    other = [f"Dense_{100 + i}" for i in range(len(plan))]
    assert formats.parse_flexflow(flexflow_text(plan, other), GRAPH, 4) == plan


def test_flexflows_text_is_written_as_it_is_read(tmp_path):
    problem = Problem(GRAPH, machine(), cost_of)
    for seed in range(5):
        drawn = random_plan(problem, random.Random(seed))
        plan = {name: replace(chosen, sums=1) for name, chosen in drawn.items()}
        (tmp_path / "plan").write_text(formats.dump_flexflow(GRAPH, plan))
        assert formats.read_plan(tmp_path / "plan", GRAPH, 4) == plan


def test_flexflows_text_cannot_say_that_sums_are_shared():
    name, degrees = next(
        (o.name, degrees) for o in GRAPH.planned for degrees in choices(o, 2) if sums_of(o, degrees)
    )
    plan = {**data_parallel(GRAPH, range(2)), name: OperatorConfiguration(degrees, (0, 1), 2)}
    with pytest.raises(PlanError, match=f"operator {name}: parts share sums"):
        formats.dump_flexflow(GRAPH, plan)
    text = formats.dump_plan(GRAPH, plan, 2)
    assert formats.parse_plan(text, GRAPH) == plan
    with pytest.raises(PlanError, match=f"operator {name}.*sums 3 .*must be 1 or 2"):
        formats.parse_plan(text.replace("sums: 2", "sums: 3"), GRAPH)
    with pytest.raises(PlanError, match=f"operator {name}: sums 'x', a whole number"):
        formats.parse_plan(text.replace("sums: 2", "sums: x"), GRAPH)


def test_flexflows_text_without_devices_has_the_first_ones_in_order():
    plan = data_parallel(GRAPH, range(4))
    lines = formats.dump_flexflow(GRAPH, plan).splitlines()
    without = [lines[0]]
    for line in lines[1:]:
        name, device_type, dims, *numbers = line.split()
        without.append(" ".join([name, device_type, dims, *numbers[: int(dims)], "0"]))
    assert formats.parse_flexflow("\n".join(without), GRAPH, 4) == plan


def messages():
    """FlexFlow's strategy.proto, by the library that its files are written with."""
    pool = descriptor_pool.DescriptorPool()
    number, text, message = 5, 9, 11
    file = descriptor_pb2.FileDescriptorProto(name="strategy.proto", syntax="proto2")
    fields = {
        "Op": [
            ("name", 1, text),
            ("device_type", 2, number),
            *(("dims", 3, number), ("device_ids", 4, number), ("memory_types", 5, number)),
        ],
        "Strategy": [("ops", 1, message)],
    }
    for name, each in fields.items():
        made = file.message_type.add(name=name)
        for field, place, kind in each:
            many = kind != text and field != "device_type"
            made.field.add(name=field, number=place, type=kind, label=3 if many else 1)
    file.message_type[1].field[0].type_name = ".Op"
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Strategy"))()


@pytest.mark.parametrize(
    "dims", [[1024] * 8, [1] * 9, [0], [], [2**31 - 1]], ids=["all", "many", "zero", "none", "one"]
)
def test_a_protobuf_file_of_no_possible_parts_is_none(dims):
    strategy = messages()
    strategy.ops.add(name="a", device_type=0, dims=dims)
    assert formats.protobuf_entries(strategy.SerializeToString()) is None


def test_a_number_without_an_end_is_no_protobuf():
    assert formats.protobuf_entries(b"\x0a" + b"\x80" * 2**20 + b"\x01") is None


def test_flexflows_protobuf_is_read_as_its_text(tmp_path):
    problem = Problem(GRAPH, machine(), cost_of)
    for seed in range(5):
        drawn = random_plan(problem, random.Random(seed))
        plan = {name: replace(chosen, sums=1) for name, chosen in drawn.items()}
        strategy = messages()
        for name, chosen in plan.items():
            strategy.ops.add(
                name=name * 40,  # longer than one byte counts
                dims=reversed(chosen.degrees),
                device_ids=chosen.devices,
                device_type=0,
                memory_types=[0],
            )
        path = tmp_path / "plan.pb"
        path.write_bytes(strategy.SerializeToString())
        assert formats.read_plan(path, GRAPH, 4) == plan
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PlanError, match=r"not a strategy|cannot be read as text"):
        formats.read_plan(path, GRAPH, 4)


def test_flexflows_example_has_tables_by_number_and_one_entry_for_all_of_a_kind(tmp_path):
    model, loss, _, batches = soap_models.make("dlrm", 1)
    graph = capture(model, loss, batches[0]).graph
    strategy = messages()
    tables = [o.name for o in graph.planned if o.kind.startswith("embedding")]
    for number in range(len(tables)):
        strategy.ops.add(name=f"embedding{number}", dims=[1, 1], device_ids=[number])
    for name in ("linear", "mse_loss", "concat"):
        strategy.ops.add(name=name, dims=[1, 4])
    path = tmp_path / "dlrm_strategy_4embs_4gpus.pb"
    path.write_bytes(strategy.SerializeToString())
    plan = formats.read_plan(path, graph, 4)
    assert [plan[name] for name in tables] == [on((1, 1), number) for number in range(4)]
    rest = {name: chosen for name, chosen in plan.items() if name not in tables}
    parallel = data_parallel(graph, range(4))
    assert rest == {name: parallel[name] for name in rest}
    strategy.ops[len(tables) + 1].name = "softmax"
    path.write_bytes(strategy.SerializeToString())
    with pytest.raises(PlanError, match=r"embedding0: .*cannot be told by their order"):
        formats.read_plan(path, graph, 4)
    strategy.ops[len(tables) + 1].name = "mse_loss"
    strategy.ops[len(tables)].dims[0] = 2  # outputs in halves: the last layer gives one number
    path.write_bytes(strategy.SerializeToString())
    with pytest.raises(PlanError, match=r"operator top.2: degrees \[4, 2\] of linear"):
        formats.read_plan(path, graph, 4)


def test_flexflows_text_that_is_no_plan_is_refused():
    plan = data_parallel(GRAPH, range(2))
    text = flexflow_text(plan)
    with pytest.raises(PlanError, match="announced"):
        formats.parse_flexflow(text.replace(str(len(plan)), str(len(plan) + 1), 1), GRAPH, 2)
    with pytest.raises(PlanError, match="device 1"):
        formats.parse_flexflow(text, GRAPH, 1)
    with pytest.raises(PlanError, match="cannot be told"):
        formats.parse_flexflow("1\nDense_100\n0\n2\n1\t1\n1\n0\n", GRAPH, 2)
    entry = text.partition("\n")[2].partition(f"\n{GRAPH.planned[1].name}\n")[0]
    with pytest.raises(PlanError, match=f"{GRAPH.planned[0].name}.*twice"):
        formats.parse_flexflow(f"2\n{entry}\n{entry}\n", GRAPH, 2)
    assert not formats.is_flexflow("\u00b2 a 0 1 1 1 0")
    with pytest.raises(PlanError, match="type of device"):
        formats.parse_flexflow("1 a \u00b2 1 1 1 0", GRAPH, 2)


def test_a_graph_is_read_as_it_was_written_and_its_costs_are_found_again():
    again = parse_graph(dump_graph(GRAPH))
    assert [o.name for o in again.operators] == [o.name for o in GRAPH.operators]
    assert again.edges == GRAPH.edges
    assert again.inputs == GRAPH.inputs
    for before, after in zip(GRAPH.planned, again.planned, strict=True):
        wanted = gradients(GRAPH, before)
        assert wanted == gradients(again, after)
        assert Shard(before, before.whole, wanted).key == Shard(after, after.whole, wanted).key


def test_costs_are_kept_by_shape_and_a_missing_one_names_the_operator(tmp_path):
    operator = GRAPH.planned[0]
    table = CostTable("a card", "2.13")
    whole = Shard(operator, operator.whole, (False,) * len(operator.inputs))
    table.add(whole, ShardCost(1.5, 2.5, 0.5))
    table.write(tmp_path / "costs.json")
    again = CostTable.read(tmp_path / "costs.json")
    assert again.cost_of(operator, whole.part, whole.gradients) == ShardCost(1.5, 2.5, 0.5)
    smaller = ((0, 1), *operator.whole[1:])
    with pytest.raises(CostError, match=operator.name):
        again.cost_of(operator, smaller, whole.gradients)
    text = (tmp_path / "costs.json").read_text()
    for slip in ("-1.5", "1e30", "NaN", '"1.5"'):
        (tmp_path / "costs.json").write_text(text.replace("1.5", slip))
        with pytest.raises(CostError, match=r"\.forward_us=.*: microseconds are needed"):
            CostTable.read(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(CostError, match="not a table"):
        CostTable.read(tmp_path / "costs.json")


def test_a_machine_file_can_be_edited(tmp_path):
    path = tmp_path / "machine.json"
    before = machine(per_node=2)
    before.write(path)
    assert Machine.read(path) == before
    path.write_text(path.read_text().replace('"memory_gib": 1', '"memory_gib": 80'))
    assert Machine.read(path).memory_gib == 80


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"memory_gib"', '"memory"', "memory"),
        ('"schema": 1', '"schema": 2', "schema"),
        ('"exchange"', '"swap"', "swap"),
        ('"devices": 4', '"devices": 0', "devices"),
        ('"devices": 4', '"devices": 4.5', "devices=4.5: a whole number"),
        ('"memory_gib": 1', '"memory_gib": NaN', "memory_gib=nan: .* above 0"),
        ('"memory_gib": 1', '"memory_gib": 0', "memory_gib=0: .* above 0"),
        ('"task_us": 0.0', '"task_us": -5000', "task_us=-5000: .* 0 or more"),
        ('"step_us": 0.0', '"step_us": Infinity', r"step_us=inf: .* at most 1e\+09"),
        ('"1024": ', '"1024": 1e30, "1": ', r"within.exchange.\d.1024=1e\+30: microseconds"),
        ('"1024": ', '"1024": 0, "1": ', r"within.exchange.\d.1024=0.0: .* above 0"),
        ('"1024": ', '"1024": -1, "1": ', r"within.exchange.\d.1024=-1.0: .* above 0"),
        ('"1024": ', f'"1024": 1{"0" * 400}, "1": ', "too large"),
    ],
)
def test_a_machine_file_that_cannot_be_is_refused(tmp_path, old, new, word):
    path = tmp_path / "machine.json"
    machine().write(path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(MachineError, match=word):
        Machine.read(path)


def test_curves_are_straight_between_and_beyond_their_points():
    curve = {100: 10.0, 200: 30.0}
    assert [at_size(curve, s) for s in (1, 100, 150, 300)] == [10.0, 10.0, 20.0, 50.0]
    members = at_members({2: {100: 10.0}, 4: {100: 20.0}}, 3)
    assert members == {100: 15.0}
    assert at_members({2: {100: 10.0}, 4: {100: 20.0}}, 8) == {100: 40.0}


def test_no_disturbed_point_of_a_curve_is_continued_below_nothing():
    slow_start = at_members({2: {10: 50.0, 100: 20.0, 1000: 30.0}}, 2)
    assert [at_size(slow_start, s) for s in (1, 10, 100, 1000)] == [20.0, 20.0, 20.0, 30.0]
    slow_middle = at_members({2: {10: 5.0, 100: 9.0, 1000: 8.0}}, 2)
    assert at_size(slow_middle, 10**9) == 8.0
    assert at_size({100: 9.0, 1000: 8.0}, 10**9) < 0  # as they were measured


def test_a_machine_of_unlike_devices_and_links_is_kept_and_checked(tmp_path):
    path = tmp_path / "machine.json"
    uneven = uneven_machine()
    uneven.write(path)
    assert Machine.read(path) == uneven
    assert uneven.level(2, 3) == 2 and uneven.level(0, 1) == 0
    for change, words in (
        ({"links": ((0, 1), (1, 0))}, "links: a row of 4 levels"),
        ({"links": ((3,) * 4,) * 4}, "links.0.0=3: a level from 0 to 2"),
        ({"links": ((0, 1, 0, 0), *((0,) * 4,) * 3)}, "links.0.1=1: not as links.1.0"),
        ({"beyond": ({},)}, "beyond.0.exchange: no curve"),
        ({"speeds": (1.0,)}, "speeds: one for each of 4 devices"),
        ({"speeds": (1.0, 1.0, 0.0, 1.0)}, "speeds.2=0.0: a number above 0"),
    ):
        with pytest.raises(MachineError, match=re.escape(words)):
            replace(uneven, **change)
