"""A strategy with a bug ends its search in one line, and what was found is confirmed."""

from pathlib import Path

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.signals import ExitCode
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose
from perfsearch.pipeline.proposals import Proposals
from perfsearch.strategies.base import LOG, Strategy, StrategyError

GOOD = {"bucket": 32, "view": True}


def strategy_of(answer, hear=lambda trial: None):
    """A strategy that proposes a good configuration first, and then what ``answer`` returns."""

    class Own(Strategy):
        asked = 0

        def ask(self):
            self.asked += 1
            return GOOD if self.asked == 1 else answer()

        def tell(self, trial):
            hear(trial)

    return Own


def searched(result):
    return [t.configuration for t in result.trials if t.purpose is Purpose.SEARCH]


def bad_key(*trial):
    return {}["x"]


def heard(trial):
    if trial.purpose is Purpose.SEARCH:
        bad_key()


LINE = bad_key.__code__.co_firstlineno + 1
FAILED = f"strategy random failed: KeyError: 'x' (test_proposals.py, line {LINE}). Its traceback: "


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (
            strategy_of(lambda: {"bucket": 9999, "view": True}),
            "strategy random proposed bucket=9999; allowed: 1, 2, 4, 8, 16, 32. It is a bug",
        ),
        (strategy_of(bad_key), FAILED),
        (strategy_of(lambda: None, hear=heard), FAILED),
    ],
    ids=["outside", "raises when asked", "raises when told"],
)
def test_a_bug_ends_the_search_and_the_best_so_far_is_confirmed(
    search: Search, strategy, told
) -> None:
    search.strategy = strategy
    result = search(confirm={"finalists": 1, "max_repeats": 3})
    assert result.exit_code == ExitCode.CIRCUIT_BREAKER
    assert searched(result) == [GOOD]
    assert result.verdict.winner is not None
    assert result.best == GOOD
    (line,) = [line for line in search.view.text.splitlines() if "search ended" in line]
    assert result.reason in line
    assert result.reason.startswith(told)
    log = result.run_dir / LOG
    assert log.exists() == (told is FAILED)
    if told is FAILED:
        assert result.reason.endswith(str(log))
        assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize(
    ("proposed", "told"),
    [
        ({"bucket": 9999, "view": True}, "bucket=9999; allowed: 1, 2, 4, 8, 16, 32"),
        ({"bucket": 1, "view": 1}, "view=1; allowed: false, true"),
        ({"bucket": 1, "view": [1]}, "view=[1]; allowed: false, true"),
        ({"x": 1}, "x=1; no such knob. Allowed: bucket, view"),
        ({"bucket": 4, "view": True, "x": 1}, "x=1; no such knob. Allowed: bucket, view"),
        ({"bucket": 4}, "no view; needed: a value for each knob"),
        (5, "5; allowed: None, or a dict with a value for each of bucket, view"),
        ([], "[]; allowed: None, or a dict with a value for each of bucket, view"),
    ],
)
def test_a_proposal_outside_of_the_space_is_refused(tmp_path: Path, proposed, told) -> None:
    runner = SyntheticRunner()
    strategy = strategy_of(lambda: proposed)(runner.space, Hints(baseline=runner.baseline), 0)
    proposals = Proposals(strategy, "own", runner, tmp_path)
    assert proposals.ask() == GOOD
    for _ in range(2):  # it is not asked again
        with pytest.raises(StrategyError) as caught:
            proposals.ask()
        assert str(caught.value) == f"strategy own proposed {told}. It is a bug of the strategy"
    assert strategy.asked == 2


def test_a_range_is_told_by_its_bounds(tmp_path: Path) -> None:
    runner = SyntheticRunner()
    runner.space = Space([Knob("bucket_cap_mb", Kind.INTEGER, 25, low=1, high=512, unit="MiB")])
    runner.baseline = {"bucket_cap_mb": 25}
    strategy = strategy_of(lambda: {"bucket_cap_mb": 9999})(runner.space, Hints({}), 0)
    strategy.asked = 1
    with pytest.raises(StrategyError, match=r"own proposed bucket_cap_mb=9999; allowed: 1 to 512"):
        Proposals(strategy, "own", runner, tmp_path).ask()


def test_a_value_of_the_baseline_may_be_proposed_whatever_is_searched(tmp_path: Path) -> None:
    runner = SyntheticRunner()
    runner.space = Space([Knob("bucket", Kind.ORDINAL, 1, (2, 4, 32)), runner.space.knobs[1]])
    point = {"bucket": 1, "view": True}
    strategy = strategy_of(lambda: point)(runner.space, Hints(baseline=runner.baseline), 0)
    proposals = Proposals(strategy, "own", runner, tmp_path)
    assert [proposals.ask(), proposals.ask()] == [GOOD, point]
