"""The runner on saved tables: what it searches, shows and hands over."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.soap_cases import DEVICES, begun, settings, told

from perfsearch.cli.view import View
from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status, Trial
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.base import Plan as MeasuringPlan
from perfsearch.runners.soap import space
from perfsearch.soap import formats
from perfsearch.soap.plan import data_parallel
from perfsearch.soap.simulator.simulator import Simulator


def test_the_baseline_is_data_parallel_and_each_operator_a_knob(opened):
    runner = opened()
    assert set(runner.space.by_name) == {"bottom", "table_0", "table_1", "joined", "top"}
    plan = runner.plan(runner.baseline)
    assert plan == data_parallel(runner.inputs.graph, range(DEVICES))
    for name, value in runner.baseline.items():
        assert space.plan_to_knob(space.plan_of_knob(value)) == value
        assert value in runner.space.by_name[name].values
    assert runner.space.feasible(runner.baseline)


@pytest.mark.parametrize("name", ["mcmc", "random", "nevergrad", "bayes", "grid"])
def test_every_strategy_searches_it(tmp_path, tables, opened, name):
    runner = opened()
    strategy, trials = begun(runner, settings(tmp_path, tables, {"name": name}))
    asked = []
    for number in range(1, 5):
        configuration = strategy.ask()
        assert configuration is not None
        assert runner.space.feasible(configuration)
        asked.append(json.dumps(configuration))
        trials.append(told(runner, configuration, number))
        strategy.tell(trials[-1])
    assert len(set(asked)) == 4


def test_predictions_are_told_by_the_baseline_whatever_the_strategy(tmp_path, opened):
    runner = opened()
    trials = []
    hints = runner.hints(trials)
    before = hints.predict(runner.baseline).cost
    trials.append(told(runner, runner.baseline, 0, Purpose.BASELINE))
    slower = [10 * s for s in trials[0].measurement.step_seconds]
    trials[0] = replace(trials[0], measurement=replace(trials[0].measurement, step_seconds=slower))
    after = hints.predict(runner.baseline).cost
    assert after == pytest.approx(10 * before, rel=0.15)
    assert json.loads((tmp_path / "run" / "soap" / "machine.json").read_text())["calibrated"]


def test_the_baseline_is_not_counted_as_predicted(opened):
    runner = opened()
    trials = [told(runner, runner.baseline, 0, Purpose.BASELINE)]
    assert not [ln for ln in runner.closing_lines(runner.baseline, trials) if "beside" in ln]
    other = dict(runner.baseline, table_0="1x1@1")
    trials.append(told(runner, other, 1))
    trials[-1] = replace(
        trials[-1],
        measurement=replace(
            trials[-1].measurement,
            step_seconds=[2 * s for s in trials[-1].measurement.step_seconds],
        ),
    )
    (line,) = [ln for ln in runner.closing_lines(other, trials) if "beside the baseline" in ln]
    assert line.endswith("1 strategy beside the baseline: median error 50.0%, worst 50.0%")


def test_the_search_is_compiled_before_its_time_begins(opened, monkeypatch):
    compiled = []
    monkeypatch.setattr(Simulator, "compile", lambda self, plan: compiled.append(plan))
    runner = opened()
    assert compiled == [runner.plan(runner.baseline)]


def test_no_time_is_shown_where_nothing_fits_yet(tmp_path, tables, capsys):
    chosen = settings(tmp_path, tables, mode="estimate", device_memory_gib=1e-9)
    runner = build_runner(chosen)
    assert runner.estimate(chosen, View().note) == 1
    runner.close()
    shown = capsys.readouterr().out
    assert "cur(inf) next(inf) best(inf)" in shown
    assert "e+12" not in shown
    assert "fits the 1.024e-06 MiB of a device; the one to start from needs" in shown


def test_a_search_in_which_nothing_fits_says_by_how_much(tmp_path, tables, opened):
    limit = {"device_memory_gib": 1e-9}
    runner = opened(**limit)
    strategy, _ = begun(runner, settings(tmp_path, tables, **limit))
    strategy.ask()
    needed = 1024 * runner.predict(runner.baseline, ()).peak_gib
    assert f"the one to start from needs {needed:.4g} MiB on one" in strategy.chain_results[0].note
    assert f"it needs {needed:.4g} MiB on one device, of 1.024e-06" in runner.screen(
        runner.baseline
    )


def test_the_chain_is_run_after_the_baseline_and_shown(tmp_path, tables, opened):
    runner = opened()
    phases_ms = {"dataloader_next": 2.0}
    strategy, trials = begun(runner, settings(tmp_path, tables), phases_ms=phases_ms)
    best = strategy.ask()
    (result,) = strategy.chain_results
    assert result.series[-1][0] <= 300
    assert result.series[-1][3] == min(row[3] for row in result.series)
    assert f"{result.series[-1][0]} proposals" in result.note
    assert "from data parallel, a random plan, " in result.note
    assert "can be split" in result.note
    predicted = runner.predict(best, trials).cost
    assert predicted <= runner.predict(runner.baseline, trials).cost
    saved = json.loads((tmp_path / "run" / "soap" / "machine.json").read_text())
    assert saved["calibrated"]
    assert saved["step_us"] == 2000.0


def test_no_proposals_run_an_imported_plan_as_it_is(tmp_path, tables, opened):
    first = opened()
    whole = {**first.baseline, "table_0": "1x1@1", "table_1": "1x1@0"}
    first.export(whole, tmp_path / "apply")
    runner = opened(import_from=str(tmp_path / "apply" / "strategy.yaml"))
    chosen = settings(tmp_path, tables, {"name": "mcmc", "proposals": 0})
    strategy, trials = begun(runner, chosen)
    assert strategy.ask() == whole
    trials.append(told(runner, whole, 1))
    strategy.tell(trials[1])
    assert strategy.ask() is None


def test_pinned_operators_stay_and_lists_bound(tmp_path, tables, opened):
    runner = opened(knobs={"table_0": "1x1@1", "top": ["2x1@0,1", "1x2@1,0"]})
    assert runner.pinned == {"table_0": "1x1@1"}
    assert set(runner.space.by_name["top"].values) == {"2x1@0,1", "1x2@1,0"}
    strategy, _ = begun(runner, settings(tmp_path, tables))
    for _ in range(5):
        configuration = strategy.ask()
        if configuration is None:
            break
        assert configuration["top"] in ("2x1@0,1", "1x2@1,0")
        assert runner.plan(configuration)["table_0"].devices == (1,)


def test_a_name_with_dots_comes_as_groups_from_the_command_line(opened):
    asked = {"blocks": {0: {"up": "1x1@0"}}, "blocks.0.down": ["1x1@1"], "leave": "search"}
    assert space.by_operator(asked) == {
        "blocks.0.up": "1x1@0", "blocks.0.down": ["1x1@1"], "leave": "search"
    }  # fmt: skip
    assert "top" in opened(knobs={"top": "search"}).space.by_name


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ({"knobs": {"tpo": "1x1@0"}}, ["runner.knobs.tpo", "top"]),
        ({"knobs": {"top": "3x1@0"}}, ["runner.knobs.top=3x1@0", "2x1@0,1"]),
        ({"knobs": {"top": "nonsense"}}, ["runner.knobs.top=nonsense"]),
        ({"knobs": {"top": "0x1@"}}, ["runner.knobs.top=0x1@", "PARTS@DEVICES", "2x1@0,1"]),
        ({"knobs": {"top": None}}, ["runner.knobs.top=null", "PARTS@DEVICES"]),
        ({"knobs": {"top": {}}}, ["runner.knobs.top={}", "PARTS@DEVICES"]),
    ],
)
def test_a_pin_that_cannot_be_is_refused(opened, runner, words):
    with pytest.raises(BadInputError) as error:
        opened(**runner)
    for word in words:
        assert word in str(error.value)


def test_input_that_cannot_work_is_refused_before_anything_starts(tmp_path, tables):
    for runner, word in (
        ({"split": ["samples"]}, "samples"),
        ({"import_from": str(tmp_path / "none.yaml")}, "no such file"),
        ({"min_coverage": 2}, "min_coverage"),
        ({"export_to": str(tmp_path / "none" / "plan.yaml")}, "make it first"),
        ({"export_to": str(tmp_path)}, "a file is needed"),
    ):
        with pytest.raises(BadInputError, match=word):
            build_runner(settings(tmp_path, tables, **runner))
    with pytest.raises(BadInputError, match="captured graph"):
        build_runner(settings(tmp_path, tmp_path / "nothing"))


def test_what_is_measured_is_the_plans_text(opened, monkeypatch):
    runner = opened()
    texts = []

    def train(text, replays, plan):
        texts.append((text, replays))
        return Outcome(Status.OK)

    monkeypatch.setattr(runner._ranks, "train", train)
    runner.measure({**runner.baseline, "table_0": "1x1@1"}, MeasuringPlan(1))
    ((text, replays),) = texts
    record = yaml.safe_load(text)
    assert record["operators"]["table_0"] == {"degrees": [1, 1], "devices": [1]}
    assert not replays


def test_ddps_own_step_is_run_after_the_baseline_and_stands_beside_it(opened, monkeypatch):
    runner = opened()
    recipes = []

    def asked(recipe, configuration, options, plan):
        recipes.append((recipe, options.get("perturbed"), str(plan.log_directory)))
        measured = Measurement([0.25] * 3 if recipe == "training.ddp" else [0.5] * 3, 8)
        return Outcome(Status.OK, measured)

    monkeypatch.setattr(runner._ranks, "_ask", asked)
    first = runner.measure(runner.baseline, MeasuringPlan(0, Purpose.BASELINE))
    runner.measure(runner.baseline, MeasuringPlan(1, Purpose.SENTINEL, perturbed=True))
    assert recipes == [
        ("soap.recipe", False, "logs"),
        ("training.ddp", None, "logs/ddp"),
        ("soap.recipe", True, "logs"),
    ]
    trial = Trial(0, runner.baseline, Purpose.BASELINE, Status.OK, first.measurement, 0.5 / 8)
    lines = runner.closing_lines(runner.baseline, [trial])
    (row,) = [line for line in lines if line.startswith("DistributedDataParallel ")]
    assert row.split()[1] == "250"
    assert "runner=ddp" in row

    def failing(recipe, configuration, options, plan):
        if recipe != "training.ddp":
            return asked(recipe, configuration, options, plan)
        return Outcome(Status.CRASH, None, "unused parameters")

    monkeypatch.setattr(runner._ranks, "_ask", failing)
    outcome = runner.measure(runner.baseline, MeasuringPlan(0, Purpose.BASELINE))
    trial.measurement.environment.update(outcome.measurement.environment)
    lines = runner.closing_lines(runner.baseline, [trial])
    (row,) = [line for line in lines if line.startswith("DistributedDataParallel ")]
    assert row.endswith("failed: crash: unused parameters")


def test_other_plans_round_otherwise(opened):
    runner = opened()
    assert not runner.rounds_otherwise(runner.baseline, dict(runner.baseline))
    assert runner.rounds_otherwise(runner.baseline, {**runner.baseline, "table_0": "1x1@1"})


def test_the_export_can_be_fed_back(tmp_path, opened):
    runner = opened(export_to=str(tmp_path / "kept.yaml"))
    trials = [told(runner, runner.baseline, 0, Purpose.BASELINE)]
    runner.hints(trials)
    configuration = {**runner.baseline, "table_0": "1x1@1"}
    trials.append(told(runner, configuration, 1))
    written = {Path(p).name for p in runner.export(configuration, tmp_path / "apply")}
    assert {"strategy.yaml", "timeline.json", "simulated_against_measured.csv"} <= written
    rows = (tmp_path / "apply" / "simulated_against_measured.csv").read_text().splitlines()
    assert len(rows) == 3
    assert (tmp_path / "kept.yaml").read_text() == (
        tmp_path / "apply" / "strategy.yaml"
    ).read_text()
    assert any(line.startswith("[table_0]") for line in runner.closing_lines(configuration, trials))
    again = opened(**runner.settings_of(configuration))
    assert again.plan({}) == runner.plan(configuration)


def test_operators_that_feed_each_other_are_neighbours(opened):
    beside = opened().hints([]).neighbours
    assert set(beside["joined"]) == {"bottom", "table_0", "table_1", "top"}
    assert beside["top"] == ("joined",)
    pinned = opened(knobs={"joined": "1x2@0,1"}).hints([]).neighbours
    assert pinned == {"bottom": (), "table_0": (), "table_1": (), "top": ()}


def test_named_plans_stand_beside_what_is_handed_over(opened):
    runner = opened()
    trials = [told(runner, runner.baseline, 0, Purpose.BASELINE)]
    other = dict(runner.baseline, table_0="1x1@1", table_1="1x1@0")
    trials.append(told(runner, other, 1))
    lines = runner.closing_lines(other, trials)
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("plan ")) :]
    named = ["data parallel", "whole", "tensor parallel", "tables by device", "layers by device"]
    for name in ("handed over", *named, "each operator's own best"):
        (row,) = [row for row in rows if row.startswith(f"{name} ")]
        assert "iB" in row
    measured = {row.split("  ")[0]: row.split()[-1] for row in rows[1:8]}
    assert float(measured["data parallel"]) == pytest.approx(
        1e3 * trials[0].measurement.step_time_s, rel=1e-3
    )
    assert measured["whole"].endswith("iB")  # was not run


def test_pinned_operators_are_pinned_in_named_plans_too(opened):
    runner = opened(knobs={"table_0": "1x1@1", "top": ["2x1@0,1", "1x2@1,0"]})
    for plan in runner.job.named.values():
        assert plan["table_0"].devices == (1,)
        assert space.plan_to_knob(plan["top"]) in ("2x1@0,1", "1x2@1,0")
        assert runner.simulator.estimate(plan).seconds > 0


def test_estimate_runs_as_many_chains_as_it_is_asked_for(tmp_path, tables, capsys):
    def said(**options):
        chosen = settings(
            tmp_path, tables, {"name": "mcmc", "proposals": 80, **options}, "estimate"
        )
        runner = build_runner(chosen)
        assert runner.estimate(chosen, View().note) == 0
        runner.close()
        return capsys.readouterr().out

    assert "from data parallel; " in said(chains=1)
    assert "from data parallel, a random plan, " in said()
    assert "each operator's own best" in said()
    # and begins where it is told to
    everything = dict.fromkeys(("bottom", "table_0", "table_1", "joined", "top"), "1x1@1")
    assert "from the plan given; " in said(chains=1, start=everything)
    with pytest.raises(BadInputError, match=r"strategy\.start=.*top"):
        said(start={**everything, "top": "3x1@0"})


def test_a_dtensor_plan_is_written_only_where_it_was_run_and_gave_the_same(
    tmp_path, opened, monkeypatch
):
    runner = opened()
    trials = [told(runner, runner.baseline, 0, Purpose.BASELINE)]
    runner.hints(trials)
    answers = iter([[0.5, 0.25], [0.5, 0.4]])
    asked = []

    def ask(recipe, configuration, options, plan):
        asked.append(recipe)
        return Outcome(Status.OK, Measurement([0.1], 8, first_losses=next(answers)))

    monkeypatch.setattr(runner._ranks, "_ask", ask)
    monkeypatch.setattr(formats, "dump_dtensor", lambda *of: "the module")
    written = tmp_path / "apply" / "dtensor_plan.py"

    def reason():
        runner.export(runner.baseline, tmp_path / "apply")
        lines = runner.closing_lines(runner.baseline, trials)
        return next((line for line in lines if "dtensor_plan.py" in line), "")

    assert "was not run" in reason()
    assert not asked
    trials[0].measurement.first_losses = [0.5, 0.25]
    assert reason() == ""
    assert written.read_text() == "the module"
    written.unlink()
    assert "loss of step 1 is 0.4 where the plan itself's is 0.25" in reason()
    assert not written.exists()
    assert asked == ["soap.dtensor_step"] * 2
