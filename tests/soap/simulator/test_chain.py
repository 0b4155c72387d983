import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plain_simulator
from support.soap_graphs import (
    batch_input,
    cost_of,
    free_host_cost_of,
    linear,
    machine,
    random_graph,
    random_plan,
    uneven_machine,
)

from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import data_parallel
from perfsearch.soap.simulator import chain
from perfsearch.soap.simulator import memory as at
from perfsearch.soap.simulator.chain import ChainOptions, Engine
from perfsearch.soap.simulator.problem import Problem

MACHINES = [
    machine(
        optimizer_us_per_mib=50.0,
        optimizer_us=2.0,
        transfer_host_us=0.75,
        step_us=5.0,
        host_us=50.0,
    ),
    machine(per_node=2, sync_on_link=True, sync_host_us=0.5, copy_us=0.4, copy_us_per_mib=900.0),
    machine(devices=3, task_us=0.3, bucket_mib=1e-5, copy_us_per_mib=300.0, sync_slowdown=1.3),
    uneven_machine(optimizer_us_per_mib=50.0, sync_on_link=True),
]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, len(MACHINES) - 1), st.booleans())
def test_full_simulation_is_the_plain_one(seed, which, free_host):
    rng = random.Random(seed)
    graph, cost = random_graph(rng), free_host_cost_of if free_host else cost_of
    problem = Problem(graph, MACHINES[which], cost)
    engine = Engine(problem.tables, problem.curves)
    for _ in range(3):
        plan = random_plan(problem, rng)
        time, memory = plain_simulator.simulate(graph, MACHINES[which], cost, plan)
        assert engine.start(problem.numbers_of(plan)) == time
        assert engine.memory_bytes().tolist() == memory


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, len(MACHINES) - 1), st.booleans())
def test_delta_is_exactly_the_full_simulation(seed, which, free_host):
    rng = random.Random(seed)
    graph = random_graph(rng, count=rng.choice([2, 5, 9]))
    problem = Problem(graph, MACHINES[which], free_host_cost_of if free_host else cost_of)
    engine, full = (Engine(problem.tables, problem.curves) for _ in range(2))
    current = problem.numbers_of(random_plan(problem, rng))
    engine.start(current)
    for _ in range(12):
        drawn = problem.numbers_of(random_plan(problem, rng))
        chosen = rng.sample(range(len(current)), rng.choice([1, 1, min(3, len(current))]))
        proposed = current.copy()
        proposed[chosen] = drawn[chosen]
        time = engine.propose({place: int(proposed[place]) for place in chosen})
        assert time == full.start(proposed)
        if rng.random() < 0.5:
            engine.accept()
            current = proposed
            assert np.array_equal(engine.state(), full.state())
            assert np.array_equal(engine.memory_bytes(), full.memory_bytes())
        else:
            engine.withdraw()


def chain_of(count):
    x = batch_input("x", (8, 8))
    made = [x]
    for number in range(count):
        made.append(linear(f"linear_{number}", made[-1], 8))
    return Graph(tuple(made), frozenset({"x"}), made[-1].name, 8)


@pytest.mark.parametrize("place", [0, 10, 18])
def test_a_change_that_delays_all_alike_is_simulated_in_its_neighbourhood_only(place):
    graph = chain_of(20)
    problem = Problem(graph, machine(sync_on_link=True), free_host_cost_of)
    engine = Engine(problem.tables, problem.curves)
    configurations = problem.configurations(place)
    spread = next(i for i, c in enumerate(configurations) if c.degrees == (1, 4))
    plan = {o.name: configurations[spread] for o in graph.planned}
    numbers = problem.numbers_of(plan)
    engine.start(numbers)
    before = engine[at.STEPS_RUN]
    over_samples = next(c for c in configurations if c.degrees == (4, 1))
    changed = problem.numbers_of({**plan, f"linear_{place}": over_samples})
    time = engine.propose({place: int(changed[place])})
    steps = engine[at.STEPS_RUN] - before
    assert time == Engine(problem.tables, problem.curves).start(changed)
    assert steps < 40 - place


def test_beyond_a_devices_memory_is_infeasible():
    graph = chain_of(4)
    problem = Problem(graph, machine(), cost_of)
    engine = Engine(problem.tables, problem.curves)
    numbers = problem.numbers_of(data_parallel(graph, range(4)))
    engine.start(numbers)
    need = int(engine.memory_bytes().max())
    tight = machine()
    object.__setattr__(tight, "memory_gib", (need + 1) / 2**30)
    problem = Problem(graph, tight, cost_of)
    engine = Engine(problem.tables, problem.curves, options=ChainOptions(alpha=0.0))
    engine.start(numbers)
    assert engine.fits()
    alone = problem.numbers_of({o.name: problem.configurations(0)[0] for o in graph.planned})
    assert engine.propose({i: int(c) for i, c in enumerate(alone)}) == chain.INFEASIBLE
    engine.withdraw()
    engine.run(500)
    assert engine[at.INFEASIBLE_COUNT] > 0
    for _, plan in engine.best():
        engine.start(plan)
        assert engine.fits()
