"""What can be tuned, told without starting anything."""

import json
import os
from dataclasses import replace

import pytest
from support.search_runs import journal_in

from perfsearch.config.schema import validate
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.pipeline.search import build_runner
from perfsearch.pipeline.tunable import State, tunables


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fork", refuse)
    monkeypatch.setattr("subprocess.Popen.__init__", refuse)


def settings(**knobs):
    return validate(
        {
            "runner": {"name": "ddp", "device": "cpu", "knobs": {"static_graph": True, **knobs}},
            "strategy": {"name": "random"},
            "workload": {"name": "mlp"},
            "nproc": 2,
        }
    )


def by_name(found):
    return {one.name: one for one in found.knobs}


def test_each_knob_says_whether_it_is_searched_and_why_not():
    knobs = by_name(tunables(settings(bucket_cap_mb=[8, 25], pin_memory="search")))
    assert knobs["bucket_cap_mb"].state is State.SEARCHED
    assert knobs["bucket_cap_mb"].knob.values == (8, 25)
    assert (knobs["static_graph"].state, knobs["static_graph"].today) == (State.FIXED, True)
    assert knobs["static_graph"].why == "runner.knobs.static_graph=search searches it"
    assert knobs["pin_memory"].state is State.LEFT_OUT
    assert knobs["pin_memory"].why == "no GPU is used"


def test_what_most_is_expected_of_comes_first():
    searched = {"static_graph": "search", "bucket_cap_mb": "search", "first_bucket_mb": "search"}
    found = tunables(settings(**searched))
    names = [one.name for one in found.knobs if one.state is State.SEARCHED]
    assert names == ["bucket_cap_mb", "first_bucket_mb", "static_graph"]
    assert [one.place for one in found.knobs[:3]] == [1, 2, 3]


def test_a_fixed_knob_whose_condition_never_holds_is_not_said_to_be_searchable():
    found = tunables(settings(dataloader_workers=0, prefetch_factor="search"))
    assert by_name(found)["prefetch_factor"].why == "without effect, as dataloader_workers is fixed"


def a_search_before(directory, job, **changes):
    """The journal of a search whose baseline waited 10 ms of 100 for gradients."""
    values = {
        "phases_ms": {"forward": 30.0, "backward": 50.0, "comm_exposed": 10.0, "optimizer": 10.0},
        "bottleneck_evidence": {"with_everything_ms": 100.0, "detailed_step_ms": 100.0},
        "world_size": 2,
    }
    directory.mkdir(parents=True)
    journal = journal_in(directory, "s1")
    parameters = {f"identity/{name}": value for name, value in job.items()}
    journal.append("opened", parameters=parameters, definition={})
    trial = Trial(0, {}, Purpose.BASELINE, Status.OK, Measurement([0.1] * 8, 32, **values))
    journal.append("finished", trial={**trial.to_json(), **changes})
    journal.close()


def test_a_profile_of_the_same_job_bounds_what_a_knob_can_gain(tmp_path):
    asked = settings(bucket_cap_mb="search")
    job = build_runner(asked).identity()
    assert by_name(tunables(asked))["bucket_cap_mb"].bound is None
    a_search_before(tmp_path / "outputs" / "other", {**job, "world_size": "16"})
    (tmp_path / "outputs" / "torn").mkdir()
    (tmp_path / "outputs" / "torn" / "journal.jsonl").write_text("no journal\n")
    assert tunables(asked).profile is None, "another job's profile says nothing of this one"
    a_search_before(tmp_path / "outputs" / "same", job)
    found = tunables(asked)
    assert found.profile == tmp_path / "outputs" / "same"
    assert by_name(found)["bucket_cap_mb"].bound == pytest.approx(0.1 / 0.9)


def test_the_plain_form_is_json_that_every_program_reads(tmp_path):
    asked = settings(bucket_cap_mb="search", compile_mode="search")
    rule = "bucket_cap_mb <= 64 or compile_mode == 'none'"
    options = {**asked.runner.options, "constraints": [rule]}
    asked = replace(asked, runner=replace(asked.runner, options=options))
    a_search_before(tmp_path / "outputs" / "same", build_runner(asked).identity())
    plain = json.loads(json.dumps(tunables(asked).to_plain(), allow_nan=False))
    knob = next(one for one in plain["knobs"] if one["name"] == "bucket_cap_mb")
    assert knob["state"] == "searched"
    assert (knob["low"], knob["high"], knob["unit"]) == (1, 512, "MiB")
    assert (knob["scope"], knob["numerics"]) == ("step", "reordered")
    assert knob["gain_at_most"] == pytest.approx(0.1 / 0.9)
    assert "buckets" in knob["help"]
    assert plain["constraints"] == [rule]
    assert {bound["part"] for bound in plain["bounds"]} >= {"communication", "optimizer"}
