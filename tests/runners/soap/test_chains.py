"""Chains from several starts, and what ends them."""

import math

import pytest
from support.soap_graphs import batch_input, cost_of, linear, machine

from perfsearch.core.hints import ChainRequest
from perfsearch.runners.soap.chains import run_chains
from perfsearch.soap.graph import Graph
from perfsearch.soap.named import OWN_BEST, named_plans
from perfsearch.soap.simulator.simulator import Simulator


def simulator_of(count=6, width=16):
    made = [batch_input("x", (8, width))]
    for number in range(count):
        made.append(linear(f"linear_{number}", made[-1], width))
    graph = Graph(tuple(made), frozenset({"x"}), made[-1].name, 8)
    named = named_plans(graph, 4)
    simulator = Simulator(graph, machine(), cost_of, extra=tuple(named.values()))
    return simulator, {**named, OWN_BEST: simulator.problem.own_best()}


@pytest.fixture(scope="module")
def job():
    return simulator_of()


def test_several_chains_are_as_one_and_none_is_lost(job):
    simulator, named = job
    start = named["data parallel"]
    searched = run_chains(simulator, start, named, ChainRequest({}, 400, 3))
    found = searched.found
    assert searched.starts[:2] == ("data parallel", "a random plan")
    assert len(searched.starts) == 5
    assert searched.starts[4] == "the best of these"
    assert searched.starts[2] in named
    assert found.proposals <= 400
    best = [row[3] for row in found.series]
    assert best == sorted(best, reverse=True)
    assert [row[0] for row in found.series] == sorted(row[0] for row in found.series)
    assert found.plans[0][0] == best[-1]
    seconds = [each for each, _ in found.plans]
    assert seconds == sorted(seconds)
    assert all(a != b for (_, a), (_, b) in zip(found.plans, found.plans[1:], strict=False))
    again = run_chains(simulator, start, named, ChainRequest({}, 400, 3)).found
    assert (again.plans, again.series) == (found.plans, found.series)


def test_a_chain_from_the_best_named_plan_is_no_worse_than_that(job):
    simulator, named = job
    best = min(simulator.estimate(plan).seconds for plan in named.values())
    found = run_chains(simulator, named["whole"], named, ChainRequest({}, 8, 0, chains=3)).found
    assert found.plans[0][0] <= best


def test_no_proposals_leave_the_start_alone(job):
    simulator, named = job
    searched = run_chains(simulator, named["whole"], named, ChainRequest({}, 0, 0))
    assert searched.starts == ("whole",)
    assert [plan for _, plan in searched.found.plans] == [named["whole"]]


def test_a_chain_ends_where_half_of_it_brought_nothing(job):
    simulator, named = job
    # greedy, so that it stands still once it is in a minimum
    request = ChainRequest({}, 40_000, 0, alpha=math.inf, chains=1)
    found = run_chains(simulator, named["whole"], named, request).found
    assert 20_000 <= found.proposals < 40_000
    last = [row for row in found.series if row[0] <= found.proposals // 2]
    assert found.plans[0][0] == last[-1][3]


def test_seconds_bound_what_is_simulated(job):
    simulator, named = job
    request = ChainRequest({}, None, 0, chains=2, seconds=0.02)
    found = run_chains(simulator, named["whole"], named, request).found
    assert 0 < found.proposals < 200_000


def test_the_share_that_is_carried_over_reaches_the_chain(job, monkeypatch):
    simulator, named = job
    real, seen = simulator.search, []

    def search(start, proposals, options, *more):
        seen.append(options.carry)
        return real(start, proposals, options, *more)

    monkeypatch.setattr(simulator, "search", search)
    for share in (None, 0.0, 0.5):
        request = ChainRequest({}, 20, 0, propagation=share, chains=1)
        run_chains(simulator, named["whole"], named, request)
    assert seen == [0.25, 0.0, 0.5]


def test_the_papers_acceptance_is_per_millisecond(job):
    simulator, named = job
    start = named["whole"]
    before_ms = 1e3 * simulator.estimate(start).seconds

    def accepted(acceptance, alpha):
        request = ChainRequest({}, 2000, 0, alpha, 0, 0.0, chains=1, acceptance=acceptance)
        return run_chains(simulator, start, named, request).found.accepted

    strict, loose = accepted("milliseconds", 1e6), accepted("milliseconds", 0.0)
    alike = accepted("milliseconds", 2 / before_ms)
    assert strict < alike < loose
    # 2% of the first step is what 0.02 per percent refuses alike, where steps are about as long
    assert accepted("percent", 0.02) == pytest.approx(alike, rel=0.25)
