from __future__ import annotations

import math

import pytest
from support.search_runs import measurement, trial

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Status
from perfsearch.tracking import names


@pytest.mark.parametrize(
    ("knob", "expected"),
    [
        (Knob("a", Kind.INTEGER, None, low=1, high=4), -1),
        (Knob("a", Kind.CATEGORICAL, None, values=(None, 8, 25)), -1),
        (Knob("a", Kind.CATEGORICAL, None, values=(None, "Ring", "Tree")), "none"),
        (Knob("a", Kind.BOOLEAN, False), "none"),
    ],
)
def test_null_becomes_a_number_among_numbers_and_a_word_among_words(knob, expected):
    assert names.null_value(knob) == expected


def test_every_trial_has_the_same_params():
    params = names.knob_params({"a": None, "c": True}, ["a", "b", "c"], {"a": -1})
    assert params == {"knob/a": "-1", "knob/b": "none", "knob/c": "true"}


def test_numbers_of_a_known_measurement_come_out_in_their_units():
    """deepspeedai/DeepSpeed#2711: a step of 0.1 s is 100 ms and 320 samples/s, by name."""
    metrics = names.trial_metrics(trial(0))
    assert metrics["step_time/p50_ms"] == pytest.approx(100)
    assert metrics["throughput/samples_per_s"] == pytest.approx(320)
    assert metrics["throughput/device/samples_per_s"] == pytest.approx(160)
    assert metrics["throughput/tokens_per_s"] == pytest.approx(3200)
    assert metrics["timing/forward_ms"] == pytest.approx(50)
    assert metrics["timing_share/forward"] == pytest.approx(0.5)
    assert metrics["memory/peak_allocated_gib"] == 1.5
    assert metrics["system/cpu_utilization_percentage"] == 40
    assert "memory/peak_reserved_gib" not in metrics


def test_nodes_are_named_where_there_are_several():
    readings = {"node_0/gpu_0_power_usage_watts": 300.0, "gpu_power_usage_watts": 300.0}
    one = names.trial_metrics(trial(0, measurement=measurement(system=readings)))
    assert {key for key in one if key.startswith("system/")} == {
        "system/gpu_0_power_usage_watts",
        "system/gpu_power_usage_watts",
    }
    readings["node_1/gpu_0_power_usage_watts"] = 200.0
    two = names.trial_metrics(trial(0, measurement=measurement(system=readings)))
    assert two["system/node_1/gpu_0_power_usage_watts"] == 200


def test_steps_are_told_where_samples_cannot_be_counted():
    found = trial(0)
    found.measurement.samples_per_step = None
    metrics = names.trial_metrics(found)
    assert metrics["throughput/steps_per_s"] == pytest.approx(10)
    assert not [name for name in metrics if "samples" in name]


def test_utilisation_of_the_peak_needs_device_and_precision():
    found = measurement(
        flops_per_step=2 * 0.1 * 989e12 / 2,
        environment={"devices": [{"name": "NVIDIA H100 80GB HBM3"}], "precision": "bf16"},
    )
    assert names.trial_metrics(trial(0, measurement=found))[
        "throughput/device/mfu"
    ] == pytest.approx(0.5)
    found.environment = {}
    assert "throughput/device/mfu" not in names.trial_metrics(trial(0, measurement=found))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_but_finite_numbers_leaves(bad):
    found = measurement(system={"x": bad}, first_losses=[1.0, bad], peak_allocated_gib=bad)
    one = trial(0, measurement=found, objective=bad)
    assert all(math.isfinite(v) for v in names.trial_metrics(one).values())
    assert "objective/value" not in names.trial_metrics(one)
    assert names.trial_series(one)["series/first_loss"] == [(1, 1.0)]


def test_only_trials_that_ended_well_have_an_objective():
    late_oom = trial(1, Status.OOM, measurement=measurement(), objective=5.0)
    assert "objective/value" not in names.trial_metrics(late_oom)
    assert "objective/value" not in names.trial_metrics(trial(1, Status.PRUNED, objective=5.0))
    assert names.trial_metrics(trial(1))["objective/value"] == 640


@pytest.mark.parametrize("status", list(Status))
def test_statuses_map_as_the_interface_says(status):
    """optuna/optuna#3524: failed trials do not look FINISHED."""
    expected = {"ok": "FINISHED", "pruned": "FINISHED", "interrupted": "KILLED"}
    assert names.mlflow_status(status) == expected.get(status.value, "FAILED")


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_search_that_came_to_an_answer_is_finished_whichever_it_is(code):
    answers = {"DONE", "NO_DIFFERENCE", "SLOWER", "OTHER_COMPUTATION"}
    status = "FINISHED" if code.name in answers else "FAILED"
    assert names.mlflow_status_of_search(code) == status


def test_a_code_of_another_version_is_no_answer():
    assert {names.mlflow_status_of_search(code) for code in (7, None, [])} == {"FAILED"}


def test_long_series_are_thinned_and_count_from_one():
    points = names.downsample([float(i) for i in range(1, 1001)])
    assert len(points) <= names.SERIES_LIMIT
    assert points[0] == (1, 1.0)
    assert all(step == value for step, value in points)


def test_keys_are_made_acceptable():
    assert names.clean_key("mfu(%)") == "mfu___"
    assert len(names.clean_key("x" * 300)) == 250


def test_nested_parameters_become_dotted_keys():
    assert names.flat({"a": {"b": [1, 2], "c": None}, "d": {}}) == {
        "a.b": "[1, 2]",
        "a.c": "null",
        "d": "{}",
    }


def test_the_bottleneck_is_a_tag_where_phases_were_measured():
    found = measurement(phases_ms={"dataloader_next": 60.0})
    assert names.trial_tags(trial(0, measurement=found))["perfsearch.bottleneck"] == "input_bound"
    assert "perfsearch.bottleneck" not in names.trial_tags(trial(1, Status.OOM))


def test_a_search_is_named_by_its_strategy_with_what_is_unusual_of_it():
    told = {"runner": "ddp", "strategy": "bayes", "seed": 1, "strategy/xi": 0.1}
    assert names.search_name(told, "") == "ddp bayes xi=0.1 seed=1"
