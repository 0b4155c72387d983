"""What rank 0 decides, against an analytic objective."""

import dataclasses
import math

import pytest
from support.online_fakes import BASELINE, Inline, Job, Recorder, facts, valley

from perfsearch.core.space import key_of
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.online.controller import Controller, NotRestoredError, ProposerEndedError, merge
from perfsearch.online.log import FINAL, Log
from perfsearch.online.options import AutotuneOptions

WORST = {**BASELINE, "bucket_cap_mb": 1.0, "first_bucket_mb": 0.25}


def tune(job, earlier=None, proposer=None, **options):
    recorder, proposer = Recorder(), proposer or Inline()
    chosen = AutotuneOptions.from_mapping(options)
    controller = Controller(chosen, lambda: proposer, recorder, job.clock, earlier)
    job.run(controller)
    return controller, recorder, proposer


def test_from_the_worst_start_to_near_the_best_in_three_hundred_steps():
    job = Job(valley, start=WORST)
    controller, recorder, _ = tune(job)
    best_s = 1.01 * 0.1 * 0.98
    assert valley(controller.kept, rank=1) <= 1.05 * best_s
    assert job.configuration == controller.kept
    assert recorder.rows[-1].purpose == FINAL
    assert recorder.rows[-1].train_iter <= 300
    assert job.steps <= AutotuneOptions().most_steps


def test_the_first_sample_is_today_and_the_slowest_rank_decides():
    job = Job(valley)
    _, recorder, proposer = tune(job, max_samples=3)
    assert recorder.rows[0].purpose == Purpose.BASELINE
    assert recorder.rows[0].configuration == BASELINE
    assert proposer.told[0].cost == pytest.approx(valley(BASELINE, rank=1))
    assert len(recorder.rows[0].step_s) == 8


def test_steps_after_a_change_are_thrown_away():
    """The first three steps under new settings are slow here, and no score may show it."""
    since = {"key": None, "count": 0}

    def seconds(configuration, rank, step):
        if key_of(configuration) != since["key"]:
            since.update(key=key_of(configuration), count=0)
        if rank == 0:
            since["count"] += 1
        return valley(configuration) * (1.9 if since["count"] <= 3 else 1.0)

    _, recorder, _ = tune(Job(seconds), max_samples=6, discard_steps=4)
    samples = [r for r in recorder.rows if r.purpose == Purpose.SEARCH]
    assert len(samples) == 6
    for row in samples:
        assert row.cost_s == pytest.approx(valley(row.configuration))


def test_fixed_values_are_not_tuned():
    knobs = {"bucket_cap_mb": 40.0, "optimizer_implementation": "fused"}
    job = Job(valley)
    controller, recorder, _ = tune(job, knobs=knobs)
    tried = {r.configuration["bucket_cap_mb"] for r in recorder.rows if r.purpose == "search"}
    assert tried == {40.0}
    assert controller.kept["optimizer_implementation"] in ("default", "fused")


def test_a_lucky_reading_is_measured_again():
    """Rank 0's own settings are best; one other configuration is read 10% too fast, once."""
    seen = {}

    def seconds(configuration, rank, step):
        key = key_of(configuration)
        lucky = configuration["gradient_as_bucket_view"] and seen.setdefault(key, step) > step - 12
        slow = 1.0 if configuration == BASELINE else 1.02
        return 0.1 * slow * (0.99 if lucky else 1.0) * (1 + 0.01 * (step % 3))

    controller, recorder, _ = tune(Job(seconds), knobs={"bucket_cap_mb": 25.0})
    assert any(r.purpose == Purpose.CONFIRM for r in recorder.rows)
    assert controller.kept == BASELINE


@pytest.mark.parametrize("slower_at_first", [1.5, 5.0])
def test_todays_settings_are_always_timed_again_before_others_are_kept(slower_at_first):
    """Sample 0 is read while the job is still slow, so that all others seem much better."""

    def seconds(configuration, rank, step):
        if configuration == BASELINE:
            return 0.1 * (slower_at_first if step < 12 else 1.0)
        return 0.11 * (1 + 0.04 * abs(math.log2(configuration["bucket_cap_mb"] / 25.0)))

    controller, recorder, _ = tune(Job(seconds), max_samples=4)
    again = [r.trial for r in recorder.rows if r.purpose == Purpose.CONFIRM]
    assert again.count(0) == 2
    assert controller.kept == BASELINE


def test_todays_settings_are_timed_again_however_slow_they_are():
    def seconds(configuration, rank, step):
        return 0.5 if configuration == BASELINE else valley(configuration)

    controller, recorder, _ = tune(Job(seconds), max_samples=4)
    again = [r for r in recorder.rows if r.purpose == Purpose.CONFIRM and r.trial == 0]
    assert [r.status for r in again] == [Status.OK] * 2
    assert controller.kept != BASELINE


def test_a_refused_configuration_is_rolled_back_and_never_proposed_again():
    def refuses(configuration):
        if configuration["gradient_as_bucket_view"]:
            return "OutOfMemoryError: CUDA out of memory"
        return ""

    job = Job(valley, refuses=refuses)
    controller, recorder, _ = tune(job)
    failed = [r for r in recorder.rows if r.status == Status.OOM]
    assert failed
    assert len({key_of(r.configuration) for r in failed}) == len(failed)
    assert controller.kept["gradient_as_bucket_view"] is False
    assert job.configuration == controller.kept


def test_a_much_slower_configuration_costs_a_few_steps_only():
    def seconds(configuration, rank, step):
        return valley(configuration) * (40 if configuration["bucket_cap_mb"] < 8 else 1)

    job = Job(seconds)
    controller, recorder, _ = tune(job)
    slow = [r for r in recorder.rows if r.status == Status.PRUNED]
    assert slow
    for row in slow:
        key = key_of(row.configuration)
        assert sum(k == key for k, _ in job.history) == AutotuneOptions().discard_steps
    assert controller.kept["bucket_cap_mb"] >= 8


@pytest.mark.parametrize("every", [3, 5])
def test_a_round_of_validation_among_the_discarded_steps_prunes_nothing(every):
    """Whichever of them it falls on: it belongs to no configuration."""

    def seconds(configuration, rank, step):
        return valley(configuration) * (20 if step % every == 0 else 1)

    _, recorder, _ = tune(Job(seconds))
    assert {r.status for r in recorder.rows} == {Status.OK}


def test_beyond_the_time_limit_is_a_timeout():
    def seconds(configuration, rank, step):
        return 0.5 if configuration["bucket_cap_mb"] > 128 else valley(configuration)

    _, recorder, _ = tune(Job(seconds), time_limit_s=0.4)
    assert {r.status for r in recorder.rows if r.configuration["bucket_cap_mb"] > 128} == {
        Status.TIMEOUT
    }


def test_what_cannot_be_taken_back_is_an_error():
    job = Job(valley, refuses=lambda configuration: "RuntimeError: broken")
    with pytest.raises(NotRestoredError, match="broken"):
        tune(job)


def test_training_goes_on_while_the_strategy_thinks():
    job = Job(valley)
    _, recorder, _ = tune(job, proposer=Inline(late=40), max_samples=2)
    assert recorder.rows[-1].train_iter > 40


def test_a_strategy_that_ends_leaves_the_best_in_force():
    class Mortal(Inline):
        def ask(self):
            if len(self.told) > 5:
                raise ProposerEndedError("it was killed")
            super().ask()

    job = Job(valley)
    controller, recorder, proposer = tune(job, proposer=Mortal())
    assert recorder.rows[-1].purpose == FINAL
    assert recorder.rows[-1].reason == "it was killed"
    best = min((t for t in proposer.told), key=lambda t: t.cost)
    assert controller.kept == best.configuration | {
        k: v for k, v in controller.kept.items() if k not in best.configuration
    }
    assert job.configuration == controller.kept


def test_the_warm_up_time_is_waited_for():
    job = Job(valley)
    _, recorder, _ = tune(job, warmup_time=10.0, max_samples=1)
    assert recorder.rows[0].train_iter * 0.1 >= 10.0


def test_samples_are_stretched_to_the_confidence_time():
    _, recorder, _ = tune(Job(valley), sampling_confidence_time=3.0, max_samples=2)
    assert len(recorder.rows[1].step_s) >= 25


def test_drift_starts_tuning_again_and_noise_does_not():
    state = {"best": 64.0, "slower": 1.0}

    def seconds(configuration, rank, step):
        if step > 900:
            state.update(best=4.0, slower=1.5)
        wiggle = 1 + 0.02 * (step % 5)
        return state["slower"] * wiggle * valley(configuration, best_mb=state["best"])

    job = Job(seconds)
    recorder = Recorder()
    options = AutotuneOptions.from_mapping({"retune_on_drift": True})
    controller = Controller(options, Inline, recorder, job.clock)
    job.run(controller, most_steps=1600)
    finals = [r for r in recorder.rows if r.purpose == FINAL]
    assert len(finals) == 2
    assert finals[0].train_iter < 400
    assert finals[1].train_iter > 900
    assert finals[1].configuration["bucket_cap_mb"] < finals[0].configuration["bucket_cap_mb"]
    assert sum("tuning again" in text for text in recorder.said) == 1


def test_an_earlier_log_is_known_at_the_speed_of_today():
    kept = {**BASELINE, "bucket_cap_mb": 64.0, "gradient_as_bucket_view": True}
    trials = [
        Trial(0, dict(BASELINE), Purpose.BASELINE, Status.OK, cost=2 * valley(BASELINE)),
        Trial(1, dict(kept), Purpose.SEARCH, Status.OK, cost=2 * valley(kept)),
    ]
    job = Job(valley)
    _, recorder, proposer = tune(job, earlier=Log("job", trials, kept, True), max_samples=1)
    assert proposer.told[2].cost == pytest.approx(1.01 * valley(kept), rel=1e-6)
    assert recorder.rows[1].configuration == kept
    assert [row.purpose for row in recorder.rows].count(Purpose.SEARCH) == 1  # max_samples
    assert recorder.rows[-1].configuration == kept


@pytest.mark.parametrize(
    "options",
    [
        {"knobs": {"bucket_cap_mb": 40.0}},
        {"knobs": {"bucket_cap_mb": [8.0, 32.0]}},
        {"numerics": "exact"},
    ],
)
def test_an_earlier_log_puts_nothing_into_force_that_is_not_allowed_today(options):
    kept = {**BASELINE, "bucket_cap_mb": 64.0, "gradient_as_bucket_view": True}
    trials = [
        Trial(0, dict(BASELINE), Purpose.BASELINE, Status.OK, cost=0.2),
        Trial(1, dict(kept), Purpose.SEARCH, Status.OK, cost=0.001),
    ]
    controller, recorder, _ = tune(Job(valley), Log("job", trials, kept, True), **options)
    assert 64.0 not in {row.configuration["bucket_cap_mb"] for row in recorder.rows}
    assert controller.kept["bucket_cap_mb"] != 64.0


def test_an_earlier_best_may_be_rounded_to_bytes_and_the_ranks_too_few_for_a_knob():
    kept = {**BASELINE, "bucket_cap_mb": 0.09999942779541016}
    found = facts(ranks_per_node=2)
    knobs = {"bucket_cap_mb": [0.1, 25]}
    for best, tried in ((kept, True), ({**kept, "hierarchical_group_size": 2}, False)):
        job = Job(valley, facts=found)
        _, recorder, _ = tune(job, Log("job", [], best, True), knobs=knobs, max_samples=1)
        assert (recorder.rows[1].configuration == best) is tried


def test_an_earlier_best_that_is_todays_is_not_read_twice():
    trials = [Trial(0, dict(BASELINE), Purpose.BASELINE, Status.OK, cost=0.2)]
    earlier = Log("job", trials, dict(BASELINE), True)
    _, recorder, _ = tune(Job(valley), earlier, max_samples=2)
    searched = [r.configuration for r in recorder.rows if r.purpose == Purpose.SEARCH]
    assert len(searched) == 2 and BASELINE not in searched


def test_freeze_tunes_nothing(tmp_path):
    (tmp_path / "log.csv").touch()
    kept = {**BASELINE, "bucket_cap_mb": 64.0}
    job = Job(valley)
    controller, recorder, _ = tune(
        job, earlier=Log("job", [], {**kept, "unknown": 1}, True), freeze=tmp_path / "log.csv"
    )
    assert [r.purpose for r in recorder.rows] == [FINAL]
    assert job.configuration == controller.kept == kept
    assert any("unknown" in text for text in recorder.said)


def test_nothing_to_tune_says_why():
    fixed = dict.fromkeys(BASELINE, "the model is wrapped by its own class")
    job = Job(valley, facts=facts(fixed=fixed))
    controller, recorder, _ = tune(job)
    assert [r.purpose for r in recorder.rows] == [FINAL]
    assert "its own class" in recorder.rows[0].reason
    assert controller.kept == BASELINE


def test_what_one_rank_cannot_change_none_does():
    one, two = facts(), facts(fixed={"static_graph": "no"})
    assert merge([one, two])["fixed"] == {"static_graph": "no"}
    other = facts(configuration={**BASELINE, "bucket_cap_mb": 1.0})
    with pytest.raises(RuntimeError, match="ranks 0 and 1 differ in configuration"):
        merge([one, other])


def test_an_early_end_of_training_leaves_the_best_so_far():
    job = Job(valley)
    recorder, proposer = Recorder(), Inline()
    controller = Controller(AutotuneOptions(), lambda: proposer, recorder, job.clock)
    assert controller.unfinished("training ended") is None
    job.run(controller, most_steps=120)
    row = controller.unfinished("training ended")
    assert (row.purpose, row.status) == (FINAL, "unfinished")
    assert row.cost_s == min(t.cost for t in proposer.told)
    assert dataclasses.replace(row).reason == "training ended"
