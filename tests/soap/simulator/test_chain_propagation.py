"""A chain's proposals: one operator anew, or one operator's configuration carried to others."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.soap_graphs import batch_input, cost_of, linear, machine

from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import OperatorConfiguration, data_parallel
from perfsearch.soap.simulator.chain import ChainOptions, Engine
from perfsearch.soap.simulator.problem import Problem

DEVICES = 4
STEPS = 80

Course = list[list[OperatorConfiguration]]


@pytest.fixture(scope="module")
def row() -> Problem:
    """Six layers, each fed by the one before."""
    layers = [batch_input("x", (8, 16))]
    for number in range(6):
        layers.append(linear(f"layer_{number}", layers[-1], 16))
    graph = Graph(tuple(layers), frozenset({"x"}), "layer_5", 8)
    return Problem(graph, machine(DEVICES), cost_of)


def course_of(problem: Problem, share: float) -> Course:
    """The layers' configurations after each of some proposals, all of which were accepted."""
    engine = Engine(problem.tables, problem.curves, 0, ChainOptions(alpha=0.0, carry=share))
    engine.start(problem.numbers_of(data_parallel(problem.graph, range(DEVICES))))
    course = []
    for step in range(STEPS + 1):
        engine.run(step)
        plan = problem.plan_of(engine.current())
        course.append([plan[operator.name] for operator in problem.operators])
    return course


def changed_at_once(course: Course) -> list[int]:
    pairs = pairwise(course)
    return [sum(a != b for a, b in zip(old, new, strict=True)) for old, new in pairs]


def agreeing(course: Course) -> int:
    """How often two neighbouring layers had the same configuration."""
    return sum(a == b for layers in course for a, b in pairwise(layers))


def test_without_propagation_one_operator_changes_at_a_time(row: Problem) -> None:
    assert max(changed_at_once(course_of(row, 0.0))) == 1


def test_with_propagation_neighbours_change_together(row: Problem) -> None:
    course = course_of(row, 1.0)
    assert sum(count > 1 for count in changed_at_once(course)) >= 5
    assert agreeing(course) > 1.5 * agreeing(course_of(row, 0.0))
