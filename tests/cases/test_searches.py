"""Public cases about whole searches, over runners that answer at once."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.small_search import Search, make_settings
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Kind, Knob, Numerics, same_value
from perfsearch.core.narrow import narrow
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status, Trial
from perfsearch.pipeline import confirm
from perfsearch.pipeline.session import Session
from perfsearch.strategies import load, names


def fail_where(status, condition):
    return lambda c, p: Outcome(status, reason="as told") if condition(c, p) else None


def test_proposals_do_not_depend_on_the_way_of_failing(search: Search) -> None:
    """optuna/optuna#1552: exception, exit code and timeout lead to the same sequence."""

    def raises(configuration, plan):
        if configuration["bucket"] >= 8:
            raise RuntimeError("boom")
        return None

    def sequence(place, fail):
        result = search(
            SyntheticRunner(fail=fail),
            strategy={"name": "bayes"},
            run_dir=str(search.run_dir) + str(place),
            budget={"trials": 8, "seconds": None},
            sentinel_every=0,
        )
        return [t.configuration for t in result.trials if t.purpose is Purpose.SEARCH]

    bad = [fail_where(s, lambda c, p: c["bucket"] >= 8) for s in (Status.CRASH, Status.TIMEOUT)]
    first, *others = [sequence(i, fail) for i, fail in enumerate([raises, *bad])]
    assert all(other == first for other in others)
    assert any(c["bucket"] >= 8 for c in first)


def test_the_identical_failing_point_is_never_proposed_again(search: Search) -> None:
    """optuna/optuna#332: what failed is told as bad, and not sampled anew."""
    runner = SyntheticRunner(fail=fail_where(Status.OOM, lambda c, p: c["bucket"] > 4))
    result = search(
        runner,
        strategy={"name": "bayes"},
        budget={"trials": 30, "seconds": None},
        limits={"consecutive_failures": 30},
        sentinel_every=0,
    )
    points = [str(t.configuration) for t in result.trials if t.purpose is Purpose.SEARCH]
    assert len(points) == len(set(points))


@pytest.mark.parametrize("strategy", sorted({*names()} - {"external"}))
def test_nothing_outside_the_configured_choices_is_proposed(strategy: str) -> None:
    """deepspeedai/DeepSpeed#3474: the user's list is the list."""
    pytest.importorskip({"optuna": "optuna", "nevergrad": "nevergrad"}.get(strategy, "numpy"))
    declared = [
        Knob("zero_stage", Kind.ORDINAL, 0, values=(0, 1, 2, 3)),
        Knob("micro_batch", Kind.INTEGER, 1, low=1, high=64, log=True),
        Knob("algo", Kind.CATEGORICAL, "ring", values=("ring", "tree", "direct")),
        Knob("view", Kind.BOOLEAN, False),
    ]
    choices = {"zero_stage": [3, 1], "micro_batch": [2, 48], "algo": ["tree", "direct"]}
    knobs, pinned = narrow(declared, {**choices, "view": True}, Numerics.ALTERING)
    assert pinned == {"view": True}
    space = Space(knobs)
    baseline = {"zero_stage": 1, "micro_batch": 2, "algo": "tree"}
    proposer = load(strategy)(space, Hints(baseline=baseline), 3)
    seen = []
    for number in range(8):
        point = proposer.ask()
        if point is None:
            break
        seen.append(point)
        cost = 0.01 * (1 + number)
        proposer.tell(Trial(number, point, Purpose.SEARCH, Status.OK, cost=cost))
    assert seen
    for point in seen:
        for name, allowed in choices.items():
            assert any(same_value(point[name], value) for value in allowed)


def test_a_bad_candidate_affects_its_own_record_only(search: Search) -> None:
    """ROCm/aiter#5265: the others are measured, and the failing one is named."""
    bad = {"bucket": 8, "view": True}
    runner = SyntheticRunner(fail=fail_where(Status.CRASH, lambda c, p: dict(c) == bad))
    result = search(runner)
    calm = search(run_dir=str(search.run_dir) + "-calm")
    others = {t.number: t.cost for t in result.trials if t.configuration != bad}
    assert others == {
        t.number: t.cost for t in calm.trials if t.configuration != bad and t.number in others
    }
    with (result.run_dir / "trials.csv").open() as file:
        failed = [row for row in csv.DictReader(file) if row["status"] != "ok"]
    assert [(r["bucket"], r["view"].lower(), r["reason"]) for r in failed] == [
        ("8", "true", "as told")
    ]


def test_steps_before_an_out_of_memory_are_no_score(search: Search) -> None:
    """vllm-project/vllm#21410: a trial that runs out of memory late is oom, however fast it was."""

    def late(configuration, plan):
        if configuration["bucket"] != 8:
            return None
        fast = Measurement([1e-4] * 4, samples_per_step=32, first_losses=[3.0, 2.5])
        return Outcome(Status.OOM, fast, reason="CUDA out of memory in step 40")

    result = search(SyntheticRunner(fail=late))
    failed = [t for t in result.trials if t.configuration["bucket"] == 8]
    assert failed
    assert all(t.status is Status.OOM and t.cost is None and t.objective is None for t in failed)
    assert result.best["bucket"] != 8
    assert all(e["trial"].configuration["bucket"] != 8 for e in search.view.rows)


def test_a_refusal_costs_that_value_and_not_the_search(search: Search) -> None:
    """pytorch/pytorch#79171, pytorch/pytorch#97030: invalid for this model; the rest goes on."""
    reason = "RuntimeError: Expected to have finished reduction in the prior iteration"

    def refused(configuration, plan):
        return Outcome(Status.INVALID, reason=reason) if configuration["view"] else None

    result = search(
        SyntheticRunner(fail=refused),
        strategy={"name": "bayes"},
        budget={"trials": 9, "seconds": None},
        sentinel_every=0,
    )
    assert result.exit_code == 0
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert any(t.status is Status.INVALID for t in searched)
    assert sum(t.status is Status.OK for t in searched) >= 5, "every working value was tried"
    assert result.best["view"] is False


def test_the_best_is_given_as_values_that_run_it_again(search: Search) -> None:
    """hyperopt/hyperopt#458, hyperopt/hyperopt#322, maxpumperla/hyperas#116: never an index."""
    result = search()
    space = search.runner.space
    written = yaml.safe_load((result.run_dir / "best" / "config.yaml").read_text())
    knobs, pinned = narrow(space.knobs, written["runner"]["knobs"], Numerics.ALTERING)
    assert knobs == []
    assert pinned == result.best
    for knob in space.knobs:
        values = knob.values or (False, True)
        chosen = pinned[knob.name]
        assert any(chosen == v and type(chosen) is type(v) for v in values)
    summary = json.loads((result.run_dir / "best" / "summary.json").read_text())
    assert summary["knobs"] == result.best


def two_arms(seed: int) -> tuple[bool, bool]:
    """Whether one reading each, and whether the confirmation, finds the truly faster of two."""
    generator = np.random.default_rng(seed)
    gap = noise = 0.03
    true = {0: 1.3, 1: 1.0, 2: 1.0 + gap}
    configurations = {0: {"bucket": 1}, 1: {"bucket": 2}, 2: {"bucket": 4}}

    class Runner(SyntheticRunner):
        def measure(self, configuration, plan):
            arm = {1: 0, 2: 1, 4: 2}[configuration["bucket"]]
            step = true[arm] * np.exp(generator.normal(0, noise))
            return Outcome(Status.OK, Measurement([float(step)] * 4, 32, first_losses=[3.0]))

    runner = Runner()
    runner.space = Space([Knob("bucket", Kind.ORDINAL, 1, values=(1, 2, 4))])
    runner.baseline = {"bucket": 1}
    journal = SimpleNamespace(append=lambda name, **data: None, of=lambda *names: [])
    settings = make_settings(confirm={"finalists": 2, "max_repeats": 6})
    strategy = load("random")(runner.space, Hints(baseline=runner.baseline), seed)
    parts = (runner, strategy, journal, KeptView(), KeptTracker())
    session = Session(settings, *parts, Path("unused"))
    for arm, configuration in configurations.items():
        session.run(configuration, Purpose.SEARCH if arm else Purpose.BASELINE)
    single = session.best
    assert single is not None
    verdict = confirm.run(session)
    return single.number == 1, verdict.winner == 1


def test_the_best_is_the_best_when_measured_again() -> None:
    """hyperopt/hyperopt#628, facebook/Ax#501, optuna/optuna#2600: not the luckiest reading."""
    found = [two_arms(seed) for seed in range(200)]
    single, confirmed = (sum(column) for column in zip(*found, strict=True))
    assert single < 170, "a single reading is often wrong, or this test shows nothing"
    assert confirmed > single


def test_the_report_gives_repeats_and_spread_of_the_winner(search: Search) -> None:
    """facebook/Ax#501: repeats and their spread go with the number."""
    result = search()
    summary = json.loads((result.run_dir / "best" / "summary.json").read_text())
    assert len(summary["repeats"]["baseline"]) >= 2
    assert summary["speed_up"]["low"] < summary["speed_up"]["ratio"] < summary["speed_up"]["high"]
