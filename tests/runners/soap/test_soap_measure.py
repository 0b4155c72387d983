"""Tables for devices that are not here, measured on those that are."""

from dataclasses import replace

import pytest
import torch
from support import soap_graphs as synthetic
from support.soap_cases import DEVICES, settings

from perfsearch.core.errors import BadInputError
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.soap import report
from perfsearch.runners.soap.job import read_tables
from perfsearch.runners.soap.runner import Ranks
from perfsearch.soap.measure import median_and_spread, timed
from perfsearch.soap.simulator.machine import CostTable, for_devices, shards_of

MANY = 4


def test_parts_are_measured_for_more_devices_than_are_here(tmp_path, tables, monkeypatch):
    known = read_tables(tables)
    asked = []

    def describe(self, directory, keys, machine, devices, options):
        asked.append(devices)
        costs = CostTable("a card", "2.13")
        for shard in shards_of(known.graph, devices):
            costs.add(shard, synthetic.cost_of(shard.operator, shard.part, shard.gradients))
        replace(known, costs=costs).write(directory)

    monkeypatch.setattr(Ranks, "describe", describe)
    told = []
    cache = str(tmp_path / "cache")
    chosen = settings(tmp_path, None, mode="measure", devices=MANY, cache=cache)
    runner = build_runner(chosen)
    assert runner.own_mode("measure")(chosen, told.append) == 0
    runner.close()
    assert asked == [MANY]
    saved = tmp_path / "run" / "soap"
    assert told[0].startswith("planning for 4 devices")
    assert "nodes have 2 devices" in told[1] and str(saved / "machine.json") in told[1]
    # they are enough to plan with
    planning = replace(settings(tmp_path / "plan", saved, mode="estimate"), nproc="auto")
    planner = build_runner(planning)
    lines = []
    assert planner.estimate(planning, lines.append) == 0
    planner.close()
    assert lines[0].startswith("planning for 4 devices")


def test_parts_whose_times_scatter_are_no_ground_to_plan_on(tables):
    known = read_tables(tables)
    assert report.scatter_line(known) is None
    costs = CostTable("a card", "2.13")
    for shard in shards_of(known.graph, DEVICES):
        cost = synthetic.cost_of(shard.operator, shard.part, shard.gradients)
        costs.add(shard, replace(cost, spread=0.5))
    scattered = replace(known, costs=CostTable.from_json(costs.to_json()))
    assert "scatter by 50%" in report.scatter_line(scattered)
    assert "Do not trust a plan" in report.scatter_line(scattered)


def test_repeated_measurements_have_a_median_and_a_spread():
    assert median_and_spread([3.0, 1.0, 3.0, 1.0]) == (2.0, 1.0)
    assert median_and_spread([4.0, 4.0, 4.0, 400.0, 4.0]) == (4.0, 0.0)
    found = timed(lambda: torch.ones(1000).exp(), torch.device("cpu"))
    assert found.device_us > 0 and found.spread >= 0


def test_devices_are_a_matter_of_measuring_alone(tmp_path, tables):
    with pytest.raises(BadInputError, match="only mode=measure"):
        build_runner(settings(tmp_path, tables, mode="estimate", devices=MANY))
    with pytest.raises(BadInputError, match="leave it out"):
        build_runner(settings(tmp_path, tables, mode="measure"))


def test_what_was_not_measured_of_a_machine_is_said():
    two = synthetic.machine(devices=DEVICES)
    assert for_devices(two, DEVICES) == (two, "")
    larger, why = for_devices(two, 8)
    assert (larger.devices, larger.devices_per_node) == (8, 2)
    assert larger.across == two.within and "between nodes" in why
    fewer, why = for_devices(two, 1)
    assert fewer.devices == 1 and not why
    one = replace(two, devices=1, devices_per_node=1, within={})
    guessed, why = for_devices(one, 8)
    assert guessed.within["all_reduce"] and "not measured" in why
