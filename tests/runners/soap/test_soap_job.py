"""Input tables of the runner: saved tables, machines, models; and what is made of them alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import soap_graphs as synthetic
from support.soap_cases import DEVICES, begun, settings

from perfsearch.cli.view import View
from perfsearch.config.schema import Selected
from perfsearch.core.errors import BadInputError
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.soap.job import JOB, InputTables, JobKey, measured_tables
from perfsearch.soap import formats
from perfsearch.soap.graph import Graph, Whole, dump_graph, parse_graph
from perfsearch.soap.measure import with_optimizer
from perfsearch.soap.simulator.machine import CostTable, Machine


def test_an_estimate_says_by_what_it_searched(tmp_path, tables, capsys):
    for name in ("mcmc", "random"):
        chosen = settings(tmp_path / name, tables, {"name": name}, mode="estimate")
        runner = build_runner(chosen)
        assert runner.estimate(chosen, View().note) == 0
        runner.close()
        assert ("strategy=random needs trials" in capsys.readouterr().out) == (name == "random")


def test_tables_that_were_broken_off_are_measured_again(tmp_path, tables):
    """The job's name is written last: without it costs from the cache may be missing."""
    (tables / "job.json").unlink()
    kept = tmp_path / "tables_again"
    kept.mkdir()
    for path in tables.iterdir():
        (kept / path.name).write_text(path.read_text())
    asked = []

    def measure(directory, known, machine):
        asked.append((directory, machine))
        for path in tables.iterdir():
            (directory / path.name).write_text(path.read_text())

    job = JobKey("dlrm", 8, "tiny", options={})
    for _ in range(2):
        found = measured_tables(kept, tmp_path / "cache", "a card", "2.13", DEVICES, job, measure)
    assert asked == [(kept, None)]
    assert found.job == job


def test_a_machine_that_another_job_measured_has_this_jobs_optimizer(tmp_path, tables):
    """What the cache keeps is of the devices; state and row updates are of the optimizer."""
    rooms, asked = [], []

    def measure(directory, known, machine):
        asked.append(machine)
        directory.mkdir()
        for path in tables.iterdir():
            (directory / path.name).write_text(path.read_text())
        before = Machine.read(machine or directory / "machine.json")
        optimizers = {0: torch.optim.AdamW, 1: torch.optim.SGD}
        with_optimizer(before, torch.device("cpu"), optimizers[len(rooms)]).write(
            directory / "machine.json"
        )

    for name in ("first", "second"):
        job = JobKey(name, 8, "tiny", options={})
        rooms.append(
            measured_tables(
                tmp_path / name, tmp_path / "cache", "a card", "2.13", DEVICES, job, measure
            )
        )
    adam, sgd = (room.machine for room in rooms)
    assert adam.state_per_weight == pytest.approx(2, abs=1e-3) and not adam.updates_rows
    assert sgd.state_per_weight == 0 and sgd.updates_rows
    assert asked[0] is None and asked[1].parent == tmp_path / "cache"
    assert adam.within == sgd.within


def test_saved_tables_give_the_same_search_without_running_anything(tmp_path, tables, opened):
    runner = opened()
    slower = 1.7 * runner.simulator.estimate(runner.plan(runner.baseline)).seconds
    strategy, _ = begun(runner, settings(tmp_path, tables), step_seconds=[slower] * 3)
    best = runner.plan(strategy.ask())
    kept = str(tmp_path / "again.yaml")
    saved = tmp_path / "run" / "soap"
    again = settings(tmp_path / "other", saved, mode="estimate", export_to=kept)
    planner = build_runner(again)
    assert planner.estimate(again, View().note) == 0
    planner.close()
    assert formats.parse_plan(Path(kept).read_text(), runner.inputs.graph) == best


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"workload": {"name": "mlp"}}, ["workload=mlp", "dlrm tiny of global batch 8"]),
        ({"workload": {"name": "dlrm", "size": "small"}}, ["workload.size=small"]),
        ({"workload": {"name": "dlrm", "rows": 7}}, ["workload.rows=7", "runner.tables="]),
        ({"workload": {"name": "dlrm", "global_batch": 4}}, ["workload.global_batch=4"]),
        ({"nproc": 3}, ["nproc=3", "of 2 devices", "machine.json"]),
        ({"mode": "search", "workload": {"name": "gpt"}}, ["workload=gpt"]),
    ],
)
def test_tables_are_taken_for_no_other_job(tmp_path, tables, changed, words):
    asked = settings(tmp_path, tables, mode="estimate")
    options = {"global_batch": 8, **changed.pop("workload", {})}
    if options.get("name"):
        asked = replace(asked, workload=Selected(options.pop("name"), options))
    with pytest.raises(BadInputError) as error:
        build_runner(replace(asked, **changed))
    for word in words:
        assert word in str(error.value)


def test_an_edited_machine_is_planned_for_and_named(tmp_path, tables, capsys):
    (tables / JOB).unlink()  # of an earlier version
    path = tables / "machine.json"
    path.write_text(path.read_text().replace('"devices": 2', '"devices": 1'))
    path.write_text(path.read_text().replace('"devices_per_node": 2', '"devices_per_node": 1'))
    asked = settings(tmp_path, tables, mode="estimate")
    asked = replace(asked, nproc="auto", workload=Selected("gpt", {"size": "auto"}))
    runner = build_runner(asked)
    assert runner.estimate(asked, View().note) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"planning for 1 device of runner.tables={tables}, model of global batch 8"
    assert (tmp_path / "run" / "soap" / JOB).exists()


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (["the loss function", "/x/perfsearch/workloads/mlp.py:32"], "mlp"),
        (["/home/me/train.py:7", "the loss function"], "custom"),
        (["the loss function"], ""),
    ],
)
def test_tables_that_do_not_say_are_known_by_their_models_file(tmp_path, sources, name):
    x = synthetic.batch_input("x", (8, 4))
    layers = [
        replace(synthetic.linear(f"layer_{i}", x, 8), source=source)
        for i, source in enumerate(sources)
    ]
    graph = Graph((x, *layers), frozenset({"x"}), layers[-1].name, 8)
    assert JobKey.read(tmp_path, graph) == JobKey(name, 8)


def test_the_name_of_the_job_is_read_again_and_checked(tmp_path, tables):
    graph = parse_graph((tables / "graph.json").read_text())
    job = JobKey("mlp", 8, "tiny", None, {"layers": 3})
    job.write(tmp_path)
    assert JobKey.read(tmp_path, graph) == job
    for slip in (replace(job, global_batch=9), replace(job, name=None), replace(job, options=3)):
        slip.write(tmp_path)
        with pytest.raises(BadInputError, match=r"job.json"):
            JobKey.read(tmp_path, graph)


def test_memory_is_a_hard_limit(opened):
    roomy = opened()
    need = roomy.simulator.estimate(roomy.plan(roomy.baseline)).peak_gib
    tight = opened(device_memory_gib=need * 0.5)
    assert "MiB on one device" in tight.screen(tight.baseline)
    assert roomy.screen(roomy.baseline) is None


def test_a_model_without_rules_is_refused_with_its_operators_named(tmp_path, opened, tables):
    x = synthetic.batch_input("x", (8, 4))
    whole = synthetic.operator(
        "odd", "whole", [x], (8, 4), [(Whole(8), Whole(4))], roles=(None, None)
    )
    graph = Graph((x, whole), frozenset({"x"}), "odd", 8)
    costs = CostTable("a card", "2.13")
    job = JobKey("", 8)
    InputTables(graph, synthetic.machine(devices=DEVICES), costs, job).write(tables)
    with pytest.raises(BadInputError, match="odd"):
        opened()


def test_a_model_without_operators_is_refused(opened, tables):
    path = tables / "graph.json"
    found = parse_graph(path.read_text())
    inputs = frozenset(operator.name for operator in found.operators)
    path.write_text(dump_graph(replace(found, inputs=inputs)))
    with pytest.raises(BadInputError, match="nothing to parallelise"):
        opened()


@pytest.mark.parametrize("mode", ["simulate", "estimate"])
def test_a_plan_is_simulated_and_searched_without_a_trial(tmp_path, tables, mode, capsys):
    outputs = []
    for _ in range(2):
        chosen = settings(tmp_path, tables, mode=mode)
        runner = build_runner(chosen)
        assert getattr(runner, mode)(chosen, View().note) == 0
        runner.close()
        shown = capsys.readouterr().out
        assert "predicted step" in shown
        assert "num_dims(2)" in shown
        memory = re.search(r"device, MiB: ([\d.]+), ([\d.]+) \(of [\d.]+ GiB\)", shown)
        assert 0 < float(memory[1]) + float(memory[2]) < 1
        outputs.append([ln for ln in shown.splitlines() if "proposals in" not in ln])
    assert outputs[0] == outputs[1]
    assert any("iter(" in ln for ln in outputs[0]) == (mode == "estimate")
