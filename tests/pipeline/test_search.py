import contextlib
import json
import math
import re
import statistics

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.cli.view import result_cells
from perfsearch.core.journal import read
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.losses import loss_disagreement
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status


def oom_where(condition):
    return lambda c, p: Outcome(Status.OOM, reason="out of memory") if condition(c, p) else None


def test_a_real_gain_is_found_confirmed_and_handed_over(search: Search) -> None:
    result = search()
    assert result.exit_code == 0
    assert result.trials[0].purpose is Purpose.BASELINE
    assert result.verdict.winner is not None
    interval = result.verdict.interval
    assert interval is not None
    assert 1 < interval.low < interval.ratio < interval.high
    assert result.best == {"bucket": 32, "view": True}
    assert (result.run_dir / "best" / "config.yaml").exists()
    assert (result.run_dir / "best" / "apply" / "env.sh").read_text() == "export BUCKET=32\n"
    assert search.runner.closed
    assert search.tracker.status == "FINISHED"


@pytest.mark.parametrize("strategy", ["auto", "fast"])
def test_what_the_diagnosis_advises_is_tried_first(search: Search, strategy: str) -> None:
    def waits_for_batches(configuration, plan):
        steps = [0.1 - 0.01 * bool(configuration["dataloader_workers"])] * 8
        phases = {"dataloader_next": 40.0, "forward": 30.0, "backward": 30.0}
        return Outcome(Status.OK, Measurement(steps, samples_per_step=32, phases_ms=phases))

    runner = SyntheticRunner(fail=waits_for_batches)
    workers = Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1, 2, 4))
    runner.space = Space([*runner.space.knobs, workers])
    runner.baseline["dataloader_workers"] = 0
    result = search(runner, strategy={"name": strategy}, budget={"trials": 3, "seconds": None})
    assert "Use more dataloader workers" in search.view.text
    first = next(t for t in result.trials if t.purpose is Purpose.SEARCH)
    assert first.configuration == {"bucket": 1, "view": False, "dataloader_workers": 2}


def test_no_gain_hands_over_the_baseline(search: Search) -> None:
    """flexflow/flexflow-train#217: never hand over something slower than the default."""
    result = search(SyntheticRunner(gain=-0.2))
    assert result.exit_code == 0
    assert result.verdict.winner is None
    assert "no gain" in result.verdict.reason
    assert result.best == {"bucket": 1, "view": False}


def test_the_best_was_itself_measured_and_says_where(search: Search) -> None:
    """orobix/quadra#118, hydra-ecosystem/hydra#2828: trial number of the best, among those run."""
    result = search()
    import json

    summary = json.loads((result.run_dir / "best" / "summary.json").read_text())
    trial = next(t for t in result.trials if t.number == summary["trial"])
    assert trial.status is Status.OK
    assert trial.configuration == result.best


def test_confirmation_is_interleaved_in_fresh_processes(search: Search) -> None:
    """Lightning-AI/pytorch-lightning#8028: what won in warm processes is measured in fresh ones."""
    result = search()
    confirm = [p for p in search.runner.plans if p.purpose is Purpose.CONFIRM]
    assert confirm
    assert all(p.fresh for p in confirm)
    numbers = {p.number for p in confirm}
    costs = result.verdict.costs
    assert len({len(c) for c in costs.values()}) == 1, "every block has every arm"
    assert numbers.isdisjoint({t.number for t in result.trials if t.purpose is Purpose.SEARCH})


def test_budget_counts_search_trials_only(search: Search) -> None:
    result = search(budget={"trials": 6, "seconds": None}, sentinel_every=2)
    purposes = [t.purpose for t in result.trials]
    assert purposes.count(Purpose.SEARCH) == 6
    assert purposes.count(Purpose.SENTINEL) == 3
    assert result.reason == "budget.trials=6 spent"


def test_a_space_that_is_used_up_ends_the_search(search: Search) -> None:
    """automl/SMAC3#959: a 6-point space with budget 50 ends with 'space exhausted'."""
    result = search(budget={"trials": 50, "seconds": None}, sentinel_every=0)
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert len(searched) <= 12
    assert "space exhausted" in result.reason


def test_every_started_trial_ends_with_a_status(search: Search) -> None:
    """optuna/optuna#386: a trial that fails is recorded all the same."""
    result = search(SyntheticRunner(fail=oom_where(lambda c, p: c["bucket"] == 8)))
    _, events = read(result.run_dir / "journal.jsonl")
    started = {e.data["trial"] for e in events if e.name == "started"}
    finished = {e.data["trial"]["number"] for e in events if e.name == "finished"}
    assert started == finished
    assert any(t.status is Status.OOM and t.cost is None for t in result.trials)


def test_a_failing_baseline_is_reported_first_and_rescued(search: Search) -> None:
    """automl/SMAC3#410: a failure of the very first run follows the same policy as any other."""
    result = search(SyntheticRunner(fail=oom_where(lambda c, p: c["bucket"] == 1)))
    assert "warning: the baseline failed: oom, out of memory" in search.view.text
    assert result.exit_code == 0
    assert result.verdict.winner is not None
    assert result.best["bucket"] != 1
    assert result.verdict.interval is None, "no speed-up over something that does not run"
    rate = result.verdict.reason.partition("does, at ")[2].partition(" samples/s")[0]
    assert float(rate) > 0
    assert "the baseline does not run (oom)" in result.verdict.reason
    summary = json.loads((result.run_dir / "best" / "summary.json").read_text())
    assert (summary["is_baseline"], summary["speed_up"]) == (False, None)
    assert summary["numbers"]["objective/value"] == pytest.approx(float(rate), rel=1e-3)


def test_a_rescue_needs_no_confirmation_to_be_handed_over(search: Search) -> None:
    runner = SyntheticRunner(fail=oom_where(lambda c, p: c["bucket"] == 1))
    result = search(runner, confirm={"max_repeats": 0})
    assert result.best["bucket"] != 1
    assert "confirm.max_repeats=0" in result.verdict.reason


def test_where_the_baseline_fails_a_failing_finalist_gives_way_to_the_next(search: Search) -> None:
    """Those that fit in the search only are gone through in order."""

    def fail(configuration, plan):
        too_tight = configuration["bucket"] == 32 and plan.purpose is Purpose.CONFIRM
        if configuration["bucket"] == 1 or too_tight:
            return Outcome(Status.OOM, reason="out of memory")
        return None

    result = search(SyntheticRunner(fail=fail), confirm={"finalists": 1})
    assert result.verdict.winner is not None
    assert result.best["bucket"] not in (1, 32)
    confirmed = [t.status for t in result.trials if t.purpose is Purpose.CONFIRM]
    assert confirmed[0] is Status.OOM
    assert confirmed[-1] is Status.OK


@pytest.mark.parametrize("finalists", [1, 2])
@pytest.mark.parametrize("block", [0, 2])
def test_a_baseline_that_fails_when_it_is_repeated_is_a_result(
    search: Search, finalists: int, block: int
) -> None:
    """It ran in the search, so that it is handed over, and nothing is claimed."""

    def fail(configuration, plan):
        if plan.purpose is not Purpose.CONFIRM or configuration != search.runner.baseline:
            return None
        before = [p for p in search.runner.plans if p.purpose is Purpose.CONFIRM]
        late = len(before) > block * (1 + finalists)
        return Outcome(Status.CRASH, reason="rank 0: ValueError: no data") if late else None

    options = {"confirm": {"finalists": finalists}}
    result = search(SyntheticRunner(fail=fail), **options)
    assert result.exit_code == 0
    assert result.verdict.winner is None and result.verdict.interval is None
    assert "the baseline failed in a fresh start (crash: rank 0: ValueError: no data)" in (
        result.verdict.reason
    )
    assert "no speed-up can be stated" in result.verdict.reason
    assert result.best == search.runner.baseline
    summary = json.loads((result.run_dir / "best" / "summary.json").read_text())
    assert (summary["is_baseline"], summary["speed_up"]) == (True, None)
    assert summary["numbers"]["objective/value"] > 0


def test_nothing_succeeds(search: Search) -> None:
    """automl/SMAC3#14: exit code 1 and a count by cause."""
    limits = {"consecutive_failures": 4}
    result = search(SyntheticRunner(fail=oom_where(lambda c, p: True)), limits=limits)
    assert result.exit_code == 1
    assert "no trial succeeded: 4 oom" in result.verdict.reason
    assert not (result.run_dir / "best").exists()


def test_failures_in_a_row_stop_it(search: Search) -> None:
    """wandb/wandb#1655: a finite number of failures in a row stops the search."""
    runner = SyntheticRunner(fail=oom_where(lambda c, p: p.number >= 3))
    result = search(runner, limits={"consecutive_failures": 3}, sentinel_every=0)
    assert result.exit_code == 3
    assert "limits.consecutive_failures=3" in result.reason
    assert sum(t.status is Status.OOM for t in result.trials if t.purpose is Purpose.SEARCH) == 3


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_on_failure(search: Search, policy: str) -> None:
    """hydra-ecosystem/hydra#2824: fail-fast exists, and going on does too."""
    runner = SyntheticRunner(fail=oom_where(lambda c, p: p.number == 2))
    result = search(runner, on_failure=policy)
    assert result.exit_code == (3 if policy == "stop" else 0)


def test_infrastructure_failures_are_retried_and_not_scored(search: Search) -> None:
    """pytorch/pytorch#91940: a taken port is not the configuration's fault."""

    def port_taken_once(configuration, plan):
        if plan.number == 4 and plan.attempt == 0:
            return Outcome(Status.INFRASTRUCTURE, reason="address already in use")
        return None

    result = search(SyntheticRunner(fail=port_taken_once))
    trial = next(t for t in result.trials if t.number == 4)
    assert trial.status is Status.OK
    attempts = [(p.attempt, p.fresh) for p in search.runner.plans if p.number == 4]
    assert attempts == [(0, False), (1, True)]


def test_infrastructure_that_stays_broken_is_bounded(search: Search) -> None:
    def always(configuration, plan):
        return Outcome(Status.INFRASTRUCTURE, reason="rendezvous refused")

    result = search(SyntheticRunner(fail=always))
    assert result.exit_code == 1
    assert len(search.runner.plans) == 3


def test_other_losses_are_diverged_and_never_best(search: Search) -> None:
    def wrong(configuration, plan):
        if not configuration["view"]:
            return None
        return Outcome(Status.OK, Measurement([0.001] * 8, 32, first_losses=[3.0, 9.9]))

    result = search(SyntheticRunner(fail=wrong))
    wrong_trials = [t for t in result.trials if t.configuration["view"]]
    assert wrong_trials
    assert all(t.status is Status.DIVERGED and t.cost is None for t in wrong_trials)
    assert "loss of step 1 is 9.9" in wrong_trials[0].reason
    assert result.best["view"] is False


def test_an_objective_that_is_no_number_fails_that_trial_only(search: Search) -> None:
    """hydra-ecosystem/hydra#2237: NaN marks the trial failed and the search proceeds."""

    def nan(configuration, plan):
        if plan.number != 3:
            return None
        return Outcome(Status.OK, Measurement([math.inf] * 8, 32, first_losses=[3.0, 2.5]))

    result = search(SyntheticRunner(fail=nan))
    assert next(t for t in result.trials if t.number == 3).status is Status.DIVERGED
    assert result.exit_code == 0


def test_screened_configurations_cost_no_trial(search: Search) -> None:
    runner = SyntheticRunner(screen=lambda c: "too large" if c["bucket"] >= 8 else None)
    result = search(runner, budget={"trials": 50, "seconds": None})
    assert all(t.configuration["bucket"] < 8 for t in result.trials)
    _, events = read(result.run_dir / "journal.jsonl")
    assert sum(e.name == "screened" for e in events) == 6


def test_drift_of_the_baseline_starts_the_processes_anew(search: Search) -> None:
    def slower_later(configuration, plan):
        if plan.number < 6 or configuration != {"bucket": 1, "view": False}:
            return None
        return Outcome(Status.OK, Measurement([0.13] * 8, 32, first_losses=[3.0, 2.5]))

    search(SyntheticRunner(fail=slower_later, spread=0.002), sentinel_every=5)
    assert "the baseline now reads -23" in search.view.text
    after = next(p for p in search.runner.plans if p.number == 7)
    assert after.fresh


def test_a_finalist_that_fails_when_confirmed_is_out(search: Search) -> None:
    def only_warm(configuration, plan):
        if configuration == {"bucket": 32, "view": True} and plan.purpose is Purpose.CONFIRM:
            return Outcome(Status.OOM, reason="out of memory in a fresh process")
        return None

    result = search(SyntheticRunner(fail=only_warm))
    assert result.best != {"bucket": 32, "view": True}
    assert "in fresh processes" in search.view.text


def test_the_search_says_after_how_many_steps_it_has_paid_for_itself(search: Search) -> None:
    search()
    assert "has paid for itself after" in search.view.text


def test_it_pays_for_itself_by_samples_where_the_batch_is_free(search: Search) -> None:
    """Steps that are half as long again, of twice as many samples, save a quarter."""

    def larger(configuration, plan):
        step, samples = (0.15, 64) if configuration["view"] else (0.1, 32)
        steps = [step * (1 + 0.001 * (i % 3)) for i in range(8)]
        return Outcome(Status.OK, Measurement(steps, samples, first_losses=[3.0]))

    search(SyntheticRunner(fail=larger), batch="free")
    text = search.view.text
    assert "the global batch is 64, the baseline's is 32" in text
    assert re.search(r"has paid for itself after \d+ steps? of 32 samples", text)


def test_it_ends_when_a_trial_costs_more_than_it_can_save(search: Search) -> None:
    settings = {"strategy": {"name": "bayes"}, "sentinel_every": 0}
    result = search(budget={"trials": 12, "seconds": None, "remaining_steps": 0}, **settings)
    assert "budget.remaining_steps=0: the next trial would cost" in result.reason
    many = search(budget={"trials": 12, "seconds": None, "remaining_steps": 10**9}, **settings)
    assert "remaining_steps" not in many.reason


@pytest.mark.parametrize("key", ["finalists", "max_repeats"])
def test_without_confirmation_nothing_is_claimed(search: Search, key: str) -> None:
    result = search(confirm={key: 0})
    assert result.verdict.reason == f"not confirmed (confirm.{key}=0), so no gain is claimed"


def test_one_repeat_gives_no_interval(search: Search) -> None:
    result = search(confirm={"max_repeats": 1})
    assert result.exit_code == 0
    assert result.verdict.winner is None
    assert "too few repeats for an interval" in result.verdict.reason


@pytest.mark.parametrize(("dtype", "status"), [("bfloat16", "ok"), ("float32", "diverged")])
def test_a_loss_is_compared_as_finely_as_its_type_can_tell(
    search: Search, dtype: str, status: str
) -> None:
    """HF models in bf16: losses of other micro-batches are rounded by up to 0.8%."""

    def other(configuration, plan):
        if plan.number == 0:
            return Outcome(Status.OOM, reason="oom")
        if plan.number != 2:
            return None
        measurement = Measurement([0.13] * 8, 32, first_losses=[3.0156, 2.5])
        measurement.environment["loss_dtype"] = dtype
        return Outcome(Status.OK, measurement)

    result = search(SyntheticRunner(fail=other))
    trial = next(t for t in result.trials if t.number == 2)
    assert trial.status == status
    if status == "diverged":
        assert "where trial 1's is 3 (" in trial.reason


def test_a_small_loss_is_not_compared_by_what_a_large_one_can_tell() -> None:
    assert "tolerance" in loss_disagreement([0.02], [0.0265], 1e-3, resolution=2**-7)
    assert not loss_disagreement([0.02], [0.02015], 1e-4, resolution=2**-7)


def test_readings_that_agree_by_chance_are_no_proof(search: Search) -> None:
    result = search(SyntheticRunner(spread=0.0, gain=0.01), confirm={"max_repeats": 2})
    assert result.verdict.winner is None


def test_a_gain_that_too_few_pairs_leave_open_says_what_to_raise(search: Search) -> None:
    found = search(SyntheticRunner(spread=0.3, gain=0.5, seed=1), confirm={"max_repeats": 2})
    interval = found.verdict.interval
    assert interval is not None
    assert interval.low < 1.0 < interval.ratio
    assert "nothing shown: 2 pairs of starts are too few" in found.verdict.reason
    assert "more than confirm.max_repeats=2 pairs would tell more" in found.verdict.reason


def test_a_search_without_a_new_best_runs_out_of_patience(search: Search) -> None:
    """No configuration is better than the baseline, so the third search trial is the last."""
    result = search(SyntheticRunner(gain=-0.2), budget={"trials": 10, "patience": 3})
    assert result.reason == "budget.patience=3: no new best in 3 trials"
    assert len([t for t in result.trials if t.purpose is Purpose.SEARCH]) == 3


@pytest.mark.parametrize(("gain", "label"), [(0.2, "best so far"), (-0.2, "fastest other")])
@pytest.mark.parametrize("ended_by", ["budget", "signal"])
def test_the_closing_table_calls_nothing_best_that_is_slower_than_the_baseline(
    search: Search, gain: float, label: str, ended_by: str
) -> None:
    def ends(configuration, plan):
        if ended_by == "signal" and plan.number == 4:
            raise KeyboardInterrupt
        return None

    with contextlib.suppress(KeyboardInterrupt):
        search(SyntheticRunner(gain=gain, fail=ends), confirm={"max_repeats": 0})
    assert [row["label"] for row in search.view.rows] == ["baseline", label]


def test_the_closing_table_goes_by_all_readings_of_the_baseline(search: Search) -> None:
    """As what is a finalist does: the first reading alone may be a slow one."""

    def slow_at_first(configuration, plan):
        if plan.number:
            return None
        return Outcome(Status.OK, Measurement([0.2] * 8, 32, first_losses=[3.0, 2.5]))

    result = search(SyntheticRunner(gain=-0.2, fail=slow_at_first), sentinel_every=1)
    assert result.verdict.reason == "no trial was faster than the baseline: no gain"
    baseline, other = search.view.rows
    assert other["label"] == "fastest other" and other["objective"] < baseline["objective"]


@pytest.mark.parametrize("seed", range(4))
def test_a_single_pair_is_what_the_closing_table_goes_by(search: Search, seed: int) -> None:
    """The search's own reading is not set beside another one's objective."""
    search(SyntheticRunner(spread=0.4, gain=0.1, seed=seed), confirm={"max_repeats": 1})
    baseline, other = search.view.rows
    assert baseline["confirmed"] and other["confirmed"]
    ratio = other["objective"] / baseline["objective"]
    assert other["label"] == ("best so far" if ratio > 1 else "fastest other")
    assert result_cells([baseline, other])[2][4].startswith(f"{ratio - 1:+.1%} (one reading each")


def test_cautions_are_said_before_anything_is_started(search: Search) -> None:
    said_first: list[str] = []

    class Careful(SyntheticRunner):
        cautions = ("it uploads",)

        def open(self, run_dir) -> None:
            said_first.extend(search.view.lines)
            super().open(run_dir)

    search(Careful(), budget={"trials": 1, "seconds": None})
    assert said_first == ["warning: it uploads"]


def test_step_times_of_the_closing_table_are_those_of_its_own_windows(search: Search) -> None:
    """Windows of uneven batches are of different work: no rate tells the time of another's step."""

    class UnevenBatches(SyntheticRunner):
        def measure(self, configuration, plan):
            outcome = super().measure(configuration, plan)
            if outcome.measurement is not None and plan.purpose is Purpose.CONFIRM:
                measured = outcome.measurement
                measured.samples_per_step = 2 * measured.samples_per_step
                measured.step_seconds = [2.1 * s for s in measured.step_seconds]
            return outcome

    result = search(UnevenBatches())
    confirmed = [t for t in result.trials if t.purpose is Purpose.CONFIRM]
    today = [t for t in confirmed if t.configuration == result.trials[0].configuration]
    steps_ms = [1e3 * t.measurement.step_time_s for t in today]
    assert search.view.rows[0]["step_ms"] == pytest.approx(statistics.median(steps_ms))
