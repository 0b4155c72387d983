"""The baseline started a second time, before what is in another start is judged by it."""

import dataclasses

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.journal import read
from perfsearch.core.knob import Numerics, Part
from perfsearch.core.signals import ExitCode
from perfsearch.core.space import Space
from perfsearch.core.trial import PERTURBED, Outcome, Purpose, Status
from perfsearch.pipeline.loss_check import is_perturbed
from perfsearch.pipeline.resume import RefusedError
from perfsearch.runners.base import Perturbs, StartsScripts


class Starts(SyntheticRunner, StartsScripts):
    """Each trial in a start of its own, unless told otherwise; losses differ between starts.

    Args:
        apart: how much they differ by, relative.
        warm: of which configurations the trials go on in the baseline's start.

    """

    def __init__(self, apart=0.0, warm=lambda c: False, **more):
        super().__init__(**more)
        self.apart, self.warm, self.starts = apart, warm, 0

    def measure(self, configuration, plan):
        outcome = super().measure(configuration, plan)
        fresh = plan.fresh or not self.warm(configuration)
        self.starts += fresh or plan.purpose is Purpose.BASELINE
        if outcome.measurement is not None and fresh:
            sign = (1, -1)[self.starts % 2] if self.starts > 1 else 0
            losses = [v * (1 + sign * self.apart) for v in outcome.measurement.first_losses]
            outcome.measurement.first_losses = losses
        return dataclasses.replace(outcome, fresh_process=fresh)


def sentinels(trials):
    return [t for t in trials if t.purpose is Purpose.SENTINEL]


def test_nothing_is_diverged_where_the_baselines_own_starts_differ(search: Search) -> None:
    result = search(Starts(apart=0.04), sentinel_every=0)
    assert {t.status for t in result.trials} == {Status.OK}
    (second,) = sentinels(result.trials)
    first = min((t for t in result.trials if t.purpose is Purpose.SEARCH), key=lambda t: t.number)
    assert (first.number, second.number, second.fresh_process) == (1, 2, True)
    told = [line for line in search.view.lines if "between two starts" in line]
    assert len(told) == 1 and "differ by up to 4%" in told[0] and "held to 12%" in told[0]


def test_another_computation_is_still_found(search: Search) -> None:
    class Wrong(Starts):
        def measure(self, configuration, plan):
            outcome = super().measure(configuration, plan)
            if configuration["view"] and outcome.measurement is not None:
                doubled = [2 * v for v in outcome.measurement.first_losses]
                outcome.measurement.first_losses = doubled
            return outcome

    result = search(Wrong(apart=0.04), sentinel_every=0, strategy={"name": "grid"})
    wrong = [t for t in result.trials if t.configuration["view"]]
    assert wrong and {t.status for t in wrong} == {Status.DIVERGED}
    assert {t.status for t in result.trials if not t.configuration["view"]} == {Status.OK}


def test_what_goes_on_in_the_baselines_start_needs_no_second(search: Search) -> None:
    result = search(Starts(warm=lambda c: True), sentinel_every=0, confirm={"max_repeats": 4})
    assert not sentinels(result.trials)
    assert result.verdict.winner is not None


def test_a_confirmation_alone_finds_it_out_too(search: Search) -> None:
    """Its finalists may be measured before the baseline."""
    result = search(Starts(apart=0.04, warm=lambda c: True), sentinel_every=0)
    assert Status.DIVERGED not in {t.status for t in result.trials}


def test_after_a_resume_the_baselines_start_is_gone(search: Search) -> None:
    def interrupted(configuration, plan):
        if plan.number == 1:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        search(Starts(warm=lambda c: True, fail=interrupted), sentinel_every=0)
    result = search(Starts(warm=lambda c: True), sentinel_every=0)
    assert len(sentinels(result.trials)) == 1


def test_a_kill_in_the_second_start_leaves_both_trials_to_the_resume(search: Search) -> None:
    def interrupted(configuration, plan):
        if plan.purpose is Purpose.SENTINEL:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        search(Starts(apart=0.04, fail=interrupted), sentinel_every=0)
    whole = search(Starts(apart=0.04), sentinel_every=0)
    assert {t.status for t in whole.trials} == {Status.OK}
    assert len(sentinels(whole.trials)) == 1
    numbers = [t.number for t in whole.trials]
    assert len(set(numbers)) == len(numbers)
    _, events = read(whole.run_dir / "journal.jsonl")
    assert "warning: the strategy proposes otherwise" not in search.view.text
    assert events


def test_one_that_fails_is_told_and_charges_nobody(search: Search) -> None:
    def fail(configuration, plan):
        if plan.purpose is Purpose.SENTINEL:
            return Outcome(Status.CRASH, reason="rank 0: FileExistsError: out")
        return None

    result = search(Starts(fail=fail), sentinel_every=0)
    assert "measured again, ended crash: rank 0: FileExistsError: out" in search.view.text
    assert len(sentinels(result.trials)) == 1, "once, and not before each trial"
    assert result.exit_code == 0


def test_a_script_that_no_longer_starts_loses_nothing_of_its_search(search: Search) -> None:
    def interrupted(configuration, plan):
        if plan.number == 3:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        search(Starts(fail=interrupted))
    broken = Starts()
    broken.start_failure = "crash, rank 0: FileNotFoundError: no data"
    with pytest.raises(RefusedError, match=r"does not now: crash, rank 0: .*no data\. Mend that"):
        search(broken)
    broken.start_failed_from_outside = True
    assert search(broken).exit_code == ExitCode.CIRCUIT_BREAKER
    again = "no data. Mend that, then give the same command to go on."
    assert f"does not now: crash, rank 0: FileNotFoundError: {again}" in search.view.text
    assert broken.plans == []
    whole = search(Starts())
    assert whole.run_dir == search.run_dir and len(whole.trials) > 4


class OtherKernels(Starts):
    """``view`` computes by other kernels; one step moves the losses by some percent of rounding.

    Args:
        grown: by how much, relative, where weights are perturbed or ``view`` is on.
        wrong: how much more losses are changed where ``view`` is on.

    """

    def __init__(self, grown, wrong=0.0, **more):
        super().__init__(**more)
        self.grown, self.wrong = grown, wrong
        bucket, view = self.space.knobs
        kernels = {"numerics": Numerics.REORDERED, "shortens": (Part.COMPUTING,)}
        self.space = Space([bucket, dataclasses.replace(view, **kernels)])

    def measure(self, configuration, plan):
        outcome = super().measure(configuration, plan)
        first, *later = outcome.measurement.first_losses
        apart = (1 + self.wrong) * self.grown if configuration["view"] else 0.0
        if plan.perturbed:
            apart = -self.grown
            outcome.measurement.environment[PERTURBED] = True
        outcome.measurement.first_losses = [first, *(v * (1 + apart) for v in later)]
        return outcome


def test_other_kernels_may_change_what_rounding_makes_of_the_baseline(search: Search) -> None:
    result = search(OtherKernels(0.02), sentinel_every=0, strategy={"name": "grid"})
    assert {t.status for t in result.trials} == {Status.OK}
    perturbed = [t for t in result.trials if is_perturbed(t)]
    assert [t.purpose for t in perturbed] == [Purpose.SENTINEL], "once, and only where it is needed"
    told = [line for line in search.view.lines if "as other kernels round" in line]
    assert len(told) == 1 and "differ by up to 2%" in told[0] and "held to 6%" in told[0]


def test_what_rounding_does_not_explain_is_still_another_computation(search: Search) -> None:
    result = search(OtherKernels(0.02, wrong=9.0), sentinel_every=0, strategy={"name": "grid"})
    view = [t for t in result.trials if t.configuration["view"]]
    assert view and {t.status for t in view} == {Status.DIVERGED}
    assert {t.status for t in result.trials if not t.configuration["view"]} == {Status.OK}


def test_knobs_that_change_no_kernel_are_held_to_the_tolerance(search: Search) -> None:
    runner = OtherKernels(0.02)
    bucket, view = runner.space.knobs
    runner.space = Space([bucket, dataclasses.replace(view, shortens=(Part.COMMUNICATION,))])
    result = search(runner, sentinel_every=0, strategy={"name": "grid"})
    assert not any(is_perturbed(t) for t in result.trials)
    view = [t for t in result.trials if t.configuration["view"]]
    assert view and {t.status for t in view} == {Status.DIVERGED}


class AnotherOrder(OtherKernels, Perturbs):
    """Its runner says itself what rounds otherwise."""

    def __init__(self, grown, **more):
        super().__init__(grown, **more)
        bucket, view = self.space.knobs
        self.space = Space([bucket, dataclasses.replace(view, shortens=(Part.COMMUNICATION,))])

    def rounds_otherwise(self, reference, configuration):
        return reference["view"] != configuration["view"]


def test_a_runner_whose_plans_add_up_in_another_order_measures_what_that_makes(
    search: Search,
) -> None:
    result = search(AnotherOrder(0.02), sentinel_every=0, strategy={"name": "grid"})
    assert {t.status for t in result.trials} == {Status.OK}
    assert len([t for t in result.trials if is_perturbed(t)]) == 1


def test_where_no_loss_is_seen_it_is_said_and_the_claim_says_so(search: Search) -> None:
    class Silent(Starts):
        def measure(self, configuration, plan):
            outcome = super().measure(configuration, plan)
            if outcome.measurement is not None:
                outcome.measurement.first_losses = []
            return outcome

    result = search(Silent(), sentinel_every=0)
    said = [line for line in search.view.lines if "no backward pass of the baseline" in line]
    assert any(line.startswith("warning") for line in said)
    assert result.verdict.winner is not None
    assert result.verdict.reason.endswith("nothing shows that configurations train the same")


def test_where_no_second_start_runs_the_search_says_so_and_fails(search: Search) -> None:
    def fail(configuration, plan):
        if plan.purpose is Purpose.BASELINE:
            return None
        return Outcome(Status.CRASH, reason="rank 0: FileExistsError: pipe")

    result = search(Starts(fail=fail), sentinel_every=0, budget={"trials": 3})
    assert result.exit_code == 1
    assert "started again it ended crash: rank 0: FileExistsError: pipe" in result.verdict.reason
