"""A search that cannot gain enough is not started; a profile never is one."""

import pytest
from support.small_search import make_settings
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch.core.journal import read
from perfsearch.core.knob import Kind, Knob, Part
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose
from perfsearch.pipeline.search import search as run_search
from perfsearch.pipeline.search import strategy_factory
from perfsearch.runners.base import Plan


class Watched(SyntheticRunner):
    """Searches buckets and loader workers; its profile finds what a test says."""

    def __init__(self, exposed_ms: float = 10.0, loading_ms: float = 1.0, **more) -> None:
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
        self.exposed_ms, self.loading_ms = exposed_ms, loading_ms

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
            }
        return outcome

    def export(self, configuration, directory):
        return []


def test_the_bounds_are_printed_before_the_search(search):
    search(Watched())
    text = search.view.text
    assert "- communication +11.1%: 10.00 ms of a 100.00 ms step wait for it" in text
    assert "- optimizer +2.0%: it takes 2.00 ms of a 100.00 ms step; no knob is searched" in text
    assert "all that is searched: +12.4%" in text
    assert text.index("all that is searched") < text.index("stage search")
    assert len(search.runner.plans) > 10


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
    assert "what there is to gain, at most" in search.view.text
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
    (line,) = [ln for ln in view.text.splitlines() if ln.startswith("- loading")]
    assert ("workload.draws_in_loader=false allows it" in line) is hinted
