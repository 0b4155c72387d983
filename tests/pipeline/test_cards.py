"""What the two cards of a search say."""

import time
from pathlib import Path

import pytest
from support.small_search import Search
from support.synthetic import SyntheticRunner

from perfsearch.core.command import Command, carried_out
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Purpose
from perfsearch.core.verdict import Interval
from perfsearch.pipeline.cards import Outcome, outcome, values_of
from perfsearch.pipeline.session import Result, Verdict


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        (Verdict({3: Interval(1.5, 1.4, 1.6, 3)}, winner=3), Outcome.FASTER),
        (Verdict({3: Interval(1.0, 0.99, 1.02, 3)}), Outcome.NO_GAIN),
        (Verdict({3: Interval(1.0, 0.9, 1.2, 3)}, is_open=True), Outcome.INCONCLUSIVE),
        (Verdict(is_open=True), Outcome.INCONCLUSIVE),
        (Verdict(), Outcome.NO_GAIN),
        (Verdict(winner=3), Outcome.RESCUED),
    ],
)
def test_what_a_search_came_to(verdict, found):
    assert outcome(Result(ExitCode.DONE, Path(), [], verdict)) is found
    failed = Result(ExitCode.NO_TRIAL_SUCCEEDED, Path(), [], verdict)
    assert outcome(failed) is Outcome.FAILED


@pytest.mark.parametrize(
    ("knob", "values"),
    [
        (Knob("a", Kind.REAL, 25.0, low=1, high=512, log=True, unit="MiB"), "1 to 512 MiB (log)"),
        (Knob("a", Kind.BOOLEAN, False), "false, true"),
        (Knob("a", Kind.ORDINAL, 1, values=tuple(range(9))), "0, 1, 2, 3, 4, 5 and 3 more"),
    ],
)
def test_values_of_a_parameter(knob, values):
    assert values_of(knob) == values


class Late(SyntheticRunner):
    """A runner whose search trials take longer than its budget."""

    def measure(self, configuration, plan):
        if plan.purpose is Purpose.SEARCH:
            time.sleep(0.6)
        return super().measure(configuration, plan)


def test_the_cards_of_a_search_that_found_something(search: Search) -> None:
    with carried_out(Command("perfsearch", ["runner=replay", "budget.trials=12"])):
        result = search(budget={"trials": 12, "seconds": None})
    opening, closing = search.view.cards
    assert opening["parameters"].startswith("bucket  1, 2, 4, 8, 16, 32 (today 1)")
    assert opening["budget"].startswith("12 trials; then the best against the baseline, up to")
    assert opening["directory"] == str(search.run_dir)
    assert closing["verdict"] == result.verdict.reason
    assert closing["changed"].startswith("bucket  1 -> 32")
    assert closing["use it"] == f"source {search.run_dir}/best/apply/env.sh"
    assert closing["report"] == f"{search.run_dir}/report.html"
    assert closing["more certainty"].startswith(
        f"perfsearch runner=replay budget.trials=12 run_dir={search.run_dir} resume=extend"
    )


def test_a_script_is_started_with_what_was_found(search: Search) -> None:
    workload = {"name": "script", "command": ["train.py", "--lr", "1"]}
    with carried_out(Command("perfsearch-run", ["--search"], ["train.py", "--lr", "1"])):
        search(workload=workload)
    config = search.run_dir / "best" / "config.yaml"
    words = f"perfsearch-run --knobs {config} train.py --lr 1"
    assert search.view.cards[-1]["use it"] == words
    assert " -o resume=extend -o confirm." in search.view.cards[-1]["more certainty"]
    search(workload=workload, resume="never", run_dir=str(search.run_dir / "other"))
    assert search.view.cards[-1]["use it"].endswith("best/config.yaml train.py --lr 1")


def test_where_nothing_is_faster_the_card_has_nothing_to_use(search: Search) -> None:
    search(SyntheticRunner(gain=-0.2), budget={"trials": 6})
    closing = search.view.cards[-1]
    assert "use it" not in closing and "changed" not in closing
    assert "resume=extend budget.trials=12" in closing["search on"]


def test_a_larger_budget_is_larger_than_what_was_spent(search: Search) -> None:
    """The last trial of a budget of seconds may have lasted longer than all of it."""
    with carried_out(Command("perfsearch", ["runner=replay"])):
        search(Late(gain=-0.2), budget={"trials": 12, "seconds": 0.1}, sentinel_every=0)
    assert "budget.trials=24 budget.seconds=2" in search.view.cards[-1]["search on"]


def test_no_larger_budget_is_offered_where_everything_was_tried(search: Search) -> None:
    search(SyntheticRunner(gain=-0.2), strategy={"name": "grid"}, budget={"trials": 40})
    assert "search on" not in search.view.cards[-1]


def test_a_profile_has_neither_a_budget_nor_a_result(search: Search) -> None:
    search(mode="profile")
    opening, closing = search.view.cards
    assert set(opening) == {"job", "directory"}
    assert set(closing) == {"verdict", "report"}
