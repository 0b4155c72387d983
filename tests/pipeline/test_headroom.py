"""A search that cannot gain enough is not started; a profile never is one."""

import pytest
from support.small_search import make_settings
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch.core.journal import read
from perfsearch.core.knob import Kind, Knob, Part
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Purpose
from perfsearch.pipeline.baseline import job_line
from perfsearch.pipeline.search import search as run_search
from perfsearch.pipeline.search import strategy_factory
from perfsearch.runners.base import Plan


class Watched(SyntheticRunner):
    """Searches buckets and loader workers; its profile finds what a test says."""

    def __init__(
        self, exposed_ms: float = 10.0, loading_ms: float = 1.0, error_ms: float = 0.0, **more
    ) -> None:
        super().__init__(**more)
        self.space = Space(
            [
                Knob(
                    "bucket_cap_mb",
                    Kind.ORDINAL,
                    1,
                    values=(1, 2, 4, 8, 16, 32),
                    shortens=(Part.COMMUNICATION,),
                ),
                Knob(
                    "dataloader_workers", Kind.ORDINAL, 0, values=(0, 1), shortens=(Part.LOADING,)
                ),
            ]
        )
        self.baseline = {"bucket_cap_mb": 1, "dataloader_workers": 0}
        self.exposed_ms, self.loading_ms, self.error_ms = exposed_ms, loading_ms, error_ms

    def measure(self, configuration, plan: Plan):
        known = {"bucket": configuration["bucket_cap_mb"], "view": False}
        kept, self.space = self.space, SyntheticRunner().space
        outcome = super().measure(known, plan)
        self.space = kept
        if plan.detail == "full":
            outcome.measurement.phases_ms = {
                "dataloader_next": self.loading_ms,
                "forward": 40.0,
                "backward": 99.0 - 40.0 - 2.0 - self.loading_ms - self.exposed_ms,
                "comm_exposed": self.exposed_ms,
                "optimizer": 2.0,
            }
            outcome.measurement.bottleneck_evidence = {
                "with_everything_ms": 100.0,
                "detailed_step_ms": 100.0,
                "comm_exposed_error_ms": self.error_ms,
            }
        return outcome

    def export(self, configuration, directory):
        return []


def test_where_the_time_goes_is_shown_before_the_search(search):
    search(Watched())
    text = search.view.text
    shown = [line.split("  ") for line in text.splitlines()]
    begin = shown.index(["phase", "ms", "of the step", "gain at most", "searched for it"]) + 1
    assert shown[begin : begin + 6] == [
        ["backward", "46.00", "46.0%", "", ""],  # no peak is known, so that nothing bounds it
        ["forward", "40.00", "40.0%", "", ""],
        ["waiting for communication", "10.00", "10.0%", "+11.1%", "bucket_cap_mb"],
        ["optimizer", "2.00", "2.0%", "+2.0%", ""],
        ["waiting for batches", "1.00", "1.0%", "+1.0%", "dataloader_workers"],
        ["in no phase", "1.00", "1.0%", "+1.0%", ""],
    ]
    assert "all that is searched can gain +12.4% at most" in text
    assert text.index("where a step of 100.00 ms goes") < text.index("stage search")
    assert len(search.runner.plans) > 10


@pytest.mark.parametrize(("error_ms", "shown"), [(4.0, "+22.0%"), (6.0, "")])
def test_no_bound_is_shown_that_is_as_large_as_its_error(search, error_ms, shown):
    search(Watched(error_ms=error_ms), mode="profile")
    line = f"waiting for communication  10.00  10.0%  {shown}  bucket_cap_mb"
    assert line in search.view.text


@pytest.mark.parametrize(("without_ms", "said"), [(20.0, True), (90.0, False)])
def test_a_bound_that_its_phase_does_not_explain_says_where_it_is_from(search, without_ms, said):
    """Ranks that exchange nothing may be faster by more than they wait for it."""

    class Faster(Watched):
        def measure(self, configuration, plan):
            outcome = super().measure(configuration, plan)
            outcome.measurement.bottleneck_evidence["without_communication_ms"] = without_ms
            return outcome

    search(Faster(), mode="profile")
    line = "communication: 10.00 ms of a 100.00 ms step wait for it, and without it a step takes"
    assert (line in search.view.text) is said


def test_one_configuration_has_one_diagnosis(search):
    """The confirmation profiles the baseline again; what was said of trial 0 stands."""

    class Otherwise(Watched):
        def measure(self, configuration, plan):
            self.exposed_ms = 10.0 if plan.number == 0 else 30.0
            return super().measure(configuration, plan)

    search(Otherwise(spread=0.001))
    assert sum(p.purpose is Purpose.CONFIRM for p in search.runner.plans) > 2
    first = search.view.text.split("what holds it back:\n- ")[1].split(" ")[0]
    assert search.tracker.tags["perfsearch.bottleneck_baseline"] == first
    assert search.tracker.tags["perfsearch.bottleneck_best"] != first


def test_a_search_that_cannot_gain_enough_says_what_would_help_instead(search):
    result = search(Watched(exposed_ms=1.0))
    assert result.exit_code == 0
    assert [t.purpose for t in result.trials] == [Purpose.BASELINE]
    assert "these knobs can gain +2.0% at most, less than objective.min_gain=0.03" in result.reason
    assert "computing (" in result.reason
    assert result.best == search.runner.baseline
    assert "no gain" in result.verdict.reason


@pytest.mark.parametrize(
    "changes",
    [{"objective": {"min_gain": 0}}, {"objective": {"min_gain": 0.01}}, {"batch": "free"}],
)
def test_it_is_started_where_a_smaller_gain_is_wanted_or_nothing_is_bounded(search, changes):
    result = search(Watched(exposed_ms=1.0), **changes)
    assert any(t.purpose is Purpose.SEARCH for t in result.trials)


def test_the_baseline_and_the_first_block_of_finalists_are_profiled(search):
    search(Watched(spread=0.001), metrics={"begin_step": 30, "end_step": 33, "trace": True})
    plans = search.runner.plans
    profiled = [p.purpose for p in plans if p.detail == "full"]
    assert profiled == [Purpose.BASELINE, *[Purpose.CONFIRM] * 2]
    assert {(p.begin_step, p.end_step, p.trace) for p in plans if p.detail == "full"} == {
        (30, 33, True)
    }
    assert not any(p.trace for p in plans if p.detail == "light")
    confirm = [p.detail for p in plans if p.purpose is Purpose.CONFIRM]
    assert confirm[:2] == ["full"] * 2
    assert set(confirm[2:]) == {"light"}
    assert "what holds the best back:" in search.view.text


def test_metrics_detail_full_looks_at_every_trial(search):
    search(Watched(), metrics={"detail": "full"}, budget={"trials": 3, "seconds": None})
    assert {p.detail for p in search.runner.plans} == {"full"}


def test_a_profile_measures_the_baseline_and_nothing_else(search):
    result = search(Watched(), mode="profile")
    assert result.exit_code == 0
    assert [p.purpose for p in search.runner.plans] == [Purpose.BASELINE]
    assert "what holds it back:" in search.view.text
    assert "where a step of 100.00 ms goes" in search.view.text
    assert "nothing searched" in search.view.verdict
    assert "nothing searched" not in search.view.text
    assert (search.run_dir / "report.html").exists()
    assert not (search.run_dir / "best").exists()
    assert search.tracker.tags["perfsearch.bottleneck_baseline"] == "mostly_computing"
    assert "what holds the baseline back:" in search.tracker.note


def test_thresholds_of_the_configuration_decide(search):
    search(Watched(), mode="profile", metrics={"thresholds": {"comm_moderate": 0.05}})
    assert search.tracker.tags["perfsearch.bottleneck_baseline"] == "communication_bound"


def test_auto_searches_the_groups_in_the_order_of_their_bounds(tmp_path):
    settings = make_settings(
        run_dir=str(tmp_path / "run"), runner={"name": "ddp", "knobs": "auto"}, budget={"trials": 9}
    )
    view, tracker = KeptView(), KeptTracker()
    runner = Watched(loading_ms=20.0, exposed_ms=10.0)
    run_search(settings, runner, strategy_factory(settings), view, lambda *_: tracker)
    assert "group by group: loading (dataloader_workers), then communication" in view.text
    asked = [t for t in tracker.trials if t.purpose is Purpose.SEARCH]
    assert asked[0].configuration == {"bucket_cap_mb": 1, "dataloader_workers": 1}
    assert len(asked) > 2
    assert all(t.configuration["bucket_cap_mb"] != 1 for t in asked[1:])
    _, events = read(tmp_path / "run" / "journal.jsonl")
    opened = next(e for e in events if e.name == "opened")
    assert opened.data["definition"]["knobs_by_bound"] is True


@pytest.mark.parametrize(("runner", "hinted"), [("ddp", True), ("zero", False), ("soap", False)])
def test_loading_is_said_to_be_searchable_where_the_runner_has_a_knob_of_it(
    tmp_path, runner, hinted
):
    watched = Watched(loading_ms=20.0)
    del watched.baseline["dataloader_workers"]
    watched.space = Space([k for k in watched.space.knobs if k.name == "bucket_cap_mb"])
    settings = make_settings(
        run_dir=str(tmp_path),
        runner={"name": runner},
        workload={"name": "custom", "factory": "jobs:build"},
        budget={"trials": 0},
        confirm={"max_repeats": 0},
    )
    view = KeptView()
    run_search(settings, watched, strategy_factory(settings), view, lambda *_: KeptTracker())
    assert ("loading: workload.draws_in_loader=false allows it" in view.text) is hinted


def test_the_size_of_the_job_is_told_as_far_as_it_is_known():
    measured = Measurement([0.1] * 3, 32, tokens_per_step=2048)
    assert job_line(measured) == "a step trains 32 samples, 2,048 tokens"
    measured.environment["parameters"] = 124_439_808
    assert job_line(measured).endswith("of a model of 124 M parameters")
    measured.environment["parameters"] = 503_000
    assert job_line(measured).endswith("of a model of 0.50 M parameters")
    assert job_line(Measurement([0.1] * 3, 32)) == ""
