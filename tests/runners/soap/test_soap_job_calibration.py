"""What a measured step says of a machine, besides what was timed by itself."""

import pytest

pytest.importorskip("numba")

from support.soap_graphs import batch_input, free_host_cost_of, linear, machine

from perfsearch.core.trial import Measurement
from perfsearch.runners.soap.chains import Searched
from perfsearch.runners.soap.job import calibrated
from perfsearch.runners.soap.report import chain_line
from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import data_parallel
from perfsearch.soap.simulator.simulator import Found, Simulator

X = batch_input("x", (8, 16))
FIRST = linear("first", X, 32)
GRAPH = Graph((X, FIRST, linear("second", FIRST, 8)), frozenset({"x"}), "second", 8)
PLAN = data_parallel(GRAPH, range(4))
LOADING = {"dataloader_next": 0.2, "to_device": 0.1}


def simulator(hardware):
    return Simulator(GRAPH, hardware, free_host_cost_of)


ALONE_US = 1e6 * simulator(machine()).estimate(PLAN).seconds


def measured(step_us, **evidence):
    phases = dict(LOADING, dataloader_next=0.0) if evidence else LOADING
    return Measurement([step_us / 1e6] * 3, 8, phases_ms=phases, bottleneck_evidence=evidence)


def calibrated_by(step_us, **evidence):
    return calibrated(machine(), measured(step_us, **evidence), PLAN, simulator)


def test_processors_load_before_they_compute():
    found = calibrated_by(ALONE_US + 400)
    assert found.step_us == pytest.approx(300)
    assert found.host_us == 0
    assert found.sync_slowdown == 1
    assert found.task_us == pytest.approx(100 / 4)
    assert "ms" in found.calibrated
    again_us = 1e6 * simulator(found).estimate(PLAN).seconds
    assert again_us == pytest.approx(ALONE_US + 400, rel=0.05)


def test_devices_work_while_their_host_loads():
    found = calibrated_by(ALONE_US + 200, host_ms=0.25)
    assert found.step_us == pytest.approx(100)
    assert found.host_us == pytest.approx(250)
    assert found.sync_slowdown > 1
    assert found.task_us > 0
    again_us = 1e6 * simulator(found).estimate(PLAN).seconds
    assert again_us == pytest.approx(ALONE_US + 200, rel=0.05)


def test_a_host_that_decides_tells_nothing_of_the_devices():
    step_us = 3 * ALONE_US
    found = calibrated_by(step_us, host_ms=step_us / 1e3)
    assert (found.task_us, found.sync_slowdown) == (0, 1)
    again_us = 1e6 * simulator(found).estimate(PLAN).seconds
    assert again_us == pytest.approx(step_us, rel=0.01)


def test_a_loader_that_does_not_keep_up_is_no_slow_communication():
    phases = {"dataloader_next": 2.0, "to_device": 0.0}
    step_us = ALONE_US + 2000
    waiting = Measurement(
        [step_us / 1e6] * 3, 8, phases_ms=phases, bottleneck_evidence={"host_ms": 0.01}
    )
    found = calibrated(machine(), waiting, PLAN, simulator)
    assert (found.task_us, found.sync_slowdown) == (0, 1)
    assert found.host_us == pytest.approx(step_us)


def test_of_plans_that_a_host_makes_equal_the_one_that_devices_are_done_with_first_is_best():
    slow = simulator(machine(host_us=1e5))
    one = {name: type(c)((1,) * len(c.degrees), (0,)) for name, c in PLAN.items()}
    faster, slower = sorted([PLAN, one], key=lambda p: simulator(machine()).estimate(p).seconds)
    assert slow.estimate(faster).seconds < slow.estimate(slower).seconds
    assert slow.estimate(slower).seconds == pytest.approx(0.1, rel=0.01)


def test_a_host_that_decides_is_named_beside_the_devices_best():
    found = Found([(0.001, PLAN)], proposals=5, seconds=1.0)
    searched = Searched(found, ("data parallel",))
    assert chain_line(searched).endswith("best 1 ms")
    assert "best 1 ms of the devices, where loading and launching take 2 ms" in chain_line(
        searched, 2e3
    )


def test_a_step_that_is_shorter_than_simulated_adds_nothing():
    found = calibrated_by(0.5 * ALONE_US, host_ms=0.01)
    assert (found.task_us, found.sync_slowdown) == (0, 1)
