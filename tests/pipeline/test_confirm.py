"""How the finalist is chosen, and what is said of a confirmation."""

import shlex
import time

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.trial import Measurement, Outcome, Purpose, Status
from perfsearch.pipeline import cards
from perfsearch.result import SearchResult


class Starting(SyntheticRunner):
    """The first trial starts processes, which takes long beside a warm reading."""

    def __init__(self, start_s: float = 0.5, reading_s: float = 0.0, **more) -> None:
        super().__init__(**more)
        self.start_s, self.reading_s = start_s, reading_s

    def measure(self, configuration, plan):
        outcome = super().measure(configuration, plan)
        time.sleep(self.reading_s)
        if plan.number == 0:
            time.sleep(self.start_s)
            outcome.fresh_process = True
        return outcome


def of(result, purpose):
    return [t for t in result.trials if t.purpose is purpose]


def test_the_finalist_is_chosen_by_several_warm_readings(search: Search) -> None:
    def lucky(configuration, plan):
        """The search's readings of one are too small by half."""
        outcome = SyntheticRunner().measure(configuration, plan)
        if configuration == {"bucket": 2, "view": False} and plan.purpose is Purpose.SEARCH:
            outcome.measurement.step_seconds = [0.06] * 8
        return outcome

    result = search(Starting(fail=lucky), sentinel_every=0, strategy={"name": "grid"})
    repeats = of(result, Purpose.REPEAT)
    assert len(repeats) == 10 and not any(t.fresh_process for t in repeats)
    assert len({str(t.configuration) for t in repeats}) == 5
    fastest = min(of(result, Purpose.SEARCH), key=lambda t: t.cost)
    assert fastest.configuration == {"bucket": 2, "view": False}
    (arm,) = result.verdict.intervals
    assert arm != fastest.number
    assert result.best["bucket"] == 32
    assert result.verdict.chosen_by == repeats
    assert len(of(result, Purpose.SEARCH)) == 11, "they are no trials of the search"
    assert "the 5 fastest are read up to 2 times more, to choose the best; then" in search.view.text


def test_nothing_is_read_again_where_that_costs_as_much_as_a_start(search: Search) -> None:
    result = search(Starting(start_s=0.0, reading_s=0.2), sentinel_every=0)
    assert not of(result, Purpose.REPEAT)
    assert len(result.verdict.intervals) == 1
    assert "the best and the baseline are started anew" in search.view.text
    assert "times more" not in search.view.text


def test_one_that_fails_when_it_is_read_again_is_no_finalist(search: Search) -> None:
    def fail(configuration, plan):
        best = configuration == {"bucket": 32, "view": True}
        return (
            Outcome(Status.OOM, reason="oom") if best and plan.purpose is Purpose.REPEAT else None
        )

    result = search(Starting(fail=fail), sentinel_every=0, strategy={"name": "grid"})
    assert result.verdict.winner is not None
    assert result.best != {"bucket": 32, "view": True}


def test_readings_that_were_repeated_before_a_kill_are_not_made_again(search: Search) -> None:
    def killed(configuration, plan):
        if plan.purpose is Purpose.CONFIRM:
            raise KeyboardInterrupt
        return None

    options = {"sentinel_every": 0, "strategy": {"name": "grid"}}
    with pytest.raises(KeyboardInterrupt):
        search(Starting(fail=killed), **options)
    result = search(Starting(), **options)
    assert Purpose.REPEAT not in {p.purpose for p in search.runner.plans}
    assert len(of(result, Purpose.REPEAT)) == 10
    assert "the strategy proposes otherwise" not in search.view.text


def test_what_is_to_be_expected_is_said_first_and_what_is_sure_at_the_end(search: Search) -> None:
    result = search(SyntheticRunner(gain=0.2), sentinel_every=0)
    lines = search.view.lines
    stage = next(i for i, line in enumerate(lines) if line.startswith("stage confirm"))
    expected = next(i for i, line in enumerate(lines) if "to be expected" in line)
    assert stage < expected and " is shown in 100%, half of the time within" in lines[expected]
    low = result.verdict.interval.low - 1
    number = result.verdict.winner
    assert result.verdict.reason.startswith(
        f"trial {number} is at least {low:.1%} faster than the baseline (about "
    )


def test_where_nothing_is_shown_it_says_what_could_have_been(search: Search) -> None:
    result = search(SyntheticRunner(gain=0.0, spread=0.01), sentinel_every=0)
    assert result.verdict.winner is None
    assert result.verdict.reason.startswith("no gain shown (95% interval ")
    assert "would have been shown in 90%" in result.verdict.reason
    pairs = {len(costs) for costs in result.verdict.costs.values()}
    assert pairs == {result.verdict.interval.pairs}


def test_many_null_searches_end_before_their_last_repeat(tmp_path) -> None:
    taken = []
    for seed in range(8):
        run = Search(tmp_path / str(seed))
        result = run(SyntheticRunner(gain=0.0, seed=seed), sentinel_every=0, seed=seed)
        if result.verdict.interval is not None:
            assert result.verdict.winner is None
            taken.append(result.verdict.interval.pairs)
    assert sorted(taken)[len(taken) // 2] < 8


def test_an_arm_of_two_kinds_is_named(search: Search) -> None:
    def kinds(configuration, plan):
        outcome = SyntheticRunner(spread=0.002, gain=0.1).measure(configuration, plan)
        if plan.purpose is Purpose.CONFIRM and plan.number % 4 == 1:
            steps = outcome.measurement.step_seconds
            outcome.measurement.step_seconds = [1.3 * s for s in steps]
        return outcome

    search(SyntheticRunner(fail=kinds), sentinel_every=0)
    assert "slower than the others: they are of two kinds" in search.view.text


@pytest.mark.parametrize(
    ("repeats", "said"), [(1, "one pair has no spread"), (2, "2 pairs show only"), (4, "")]
)
def test_too_few_repeats_are_warned_of_before_anything_is_measured(
    search: Search, repeats: int, said: str
) -> None:
    search(confirm={"max_repeats": repeats})
    first = search.view.lines[0]
    assert first.startswith(f"warning: confirm.max_repeats={repeats}: {said}") == bool(said)


@pytest.mark.parametrize(
    ("spread", "found"), [(0.005, cards.Outcome.NO_GAIN), (0.6, cards.Outcome.INCONCLUSIVE)]
)
def test_a_baseline_that_scatters_leaves_open_what_no_pair_has_measured(
    search: Search, spread: float, found: cards.Outcome
) -> None:
    """Readings of one job on a busy machine: a gain of many times lay between them."""
    readings = iter([1.0, 1.0 + spread, 1.0 - spread] * 9)

    def measured(configuration, plan):
        at = 1.2 if plan.purpose is Purpose.SEARCH else next(readings)
        return Outcome(Status.OK, Measurement([at] * 8, 32, first_losses=[3.0, 2.5]))

    result = search(SyntheticRunner(fail=measured), sentinel_every=3)
    assert not of(result, Purpose.CONFIRM)
    assert cards.outcome(result) is found
    reason = result.verdict.reason
    if found is cards.Outcome.NO_GAIN:
        assert reason == "no trial was faster than the baseline: no gain"
    else:
        assert reason.startswith("inconclusive: no trial was faster than the baseline, but the")
        assert "readings lie between 20.00 and 80.00 samples/s" in reason
        assert search.view.cards[-1]["search again"].endswith(" resume=never")
    assert search.tracker.tags["perfsearch.verdict"] == found


def test_an_interval_that_holds_a_gain_that_matters_is_inconclusive_everywhere(
    search: Search,
) -> None:
    """In the closing card, in MLflow and from Python."""
    runner = SyntheticRunner(spread=0.3, gain=0.1)
    result = search(runner, confirm={"max_repeats": 3})
    interval = result.verdict.interval
    assert interval is not None and interval.low < 1 < 1.03 < interval.high
    assert result.verdict.is_open
    assert search.tracker.tags["perfsearch.verdict"] == "inconclusive"
    assert SearchResult.of(result).headline == "inconclusive, so that best is the baseline"


def test_more_certainty_asks_for_the_pairs_and_seconds_that_are_needed(search: Search) -> None:
    """The seconds of twice or four times the pairs are those that so many starts take."""

    class Slow(SyntheticRunner):
        def measure(self, configuration, plan):
            outcome = super().measure(configuration, plan)
            time.sleep(0.05)
            outcome.fresh_process = True
            return outcome

    limits = {"max_repeats": 3, "seconds": 0.35}
    result = search(Slow(spread=0.05, gain=0.1), confirm=limits, sentinel_every=0)
    assert result.verdict.is_open
    words = dict(word.split("=") for word in asked(search.view.cards[-1]["more certainty"]))
    most, seconds = int(words["confirm.max_repeats"]), float(words["confirm.seconds"])
    assert most in (6, 12)
    assert seconds >= most * 2 * 0.05
    warnings = [line for line in search.view.lines if "confirm.seconds=" in line]
    assert len(warnings) == 1 and warnings[0].startswith("warning: ")
    again = search(
        Slow(spread=0.05, gain=0.1),
        resume="extend",
        confirm={"max_repeats": most, "seconds": seconds},
        sentinel_every=0,
    )
    assert again.verdict.interval.pairs > result.verdict.interval.pairs


def test_a_confirmation_that_was_left_out_is_offered(search: Search) -> None:
    search(confirm={"max_repeats": 0})
    words = asked(search.view.cards[-1]["more certainty"])
    assert words == ["run_dir=" + str(search.run_dir), "resume=extend", "confirm.max_repeats=8"]
    assert search(resume="extend", confirm={"max_repeats": 8}).verdict.intervals


def asked(text: str) -> list[str]:
    """The keys of a suggested command."""
    return shlex.split(text)[1:]
