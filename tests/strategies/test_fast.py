from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from support.strategy_spaces import drive, ended

from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Kind, Knob, Value
from perfsearch.core.objective import Objective
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay
from perfsearch.strategies.fast import Fast

ZERO = Path(__file__).parents[1] / "data" / "zero_gpt2large_4xh100.csv"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SPACE = Space(
    [
        Knob("stage", Kind.ORDINAL, 0, (0, 1, 2)),
        Knob("batch", Kind.ORDINAL, 1, BATCHES),
        Knob("extra", Kind.BOOLEAN, False),
    ]
)
START = {"stage": 0, "batch": 1, "extra": False}


def peak(point: Mapping[str, Value]) -> float:
    return 10 - 3 * int(point["stage"] or 0) + int(point["batch"] or 0)


def cost(point: Mapping[str, Value]) -> float | None:
    if peak(point) > 40:
        return None
    return (1 + 8 / int(point["batch"] or 1)) * (0.9 if point["extra"] else 1.0)


def hints(predicts: bool) -> Hints:
    known = {"monotonic": {"batch": 1}, "stage_knob": "stage"}
    if not predicts:
        return Hints(START, **known)  # type: ignore[arg-type]
    return Hints(
        START,
        memory_limit_gib=40,
        predict=lambda point: Prediction(peak_gib=peak(point)),
        **known,  # type: ignore[arg-type]
    )


def test_it_says_what_it_will_do_first() -> None:
    strategy = Fast(SPACE, hints(predicts=False), 0)
    assert strategy.describe() == (
        "fast: first the largest batch that fits with each stage, then one knob at a time"
    )
    drive(strategy, 2, cost)
    assert strategy.describe() == "fast: the largest batch that fits, stage 0"
    plain = Fast(SPACE, Hints(START, monotonic={"batch": -1}), 0).describe()
    assert plain == "fast: first the smallest batch that fits, then one knob at a time"
    assert "what the runner expects to be fast" in Fast(SPACE, Hints(START), 0).describe()


def test_prediction_finds_the_largest_batch_without_failing_often() -> None:
    strategy = Fast(SPACE, hints(predicts=True), 0)
    strategy.tell(ended(0, START, cost(START)))
    seen = drive(strategy, 12, cost)
    assert seen[0] == {"stage": 0, "batch": 16, "extra": False}
    assert sum(cost(p) is None for p in seen) <= 3  # one a stage, to see whether more fits
    assert {"stage": 2, "batch": 32, "extra": False} in seen


def test_bisection_finds_it_without_prediction() -> None:
    strategy = Fast(SPACE, hints(predicts=False), 0)
    strategy.tell(ended(0, START, cost(START)))
    seen = drive(strategy, 14, cost)
    assert {"stage": 0, "batch": 16, "extra": False} in seen
    assert {"stage": 2, "batch": 32, "extra": False} in seen
    stages = [p["stage"] for p in seen]
    assert stages[: stages.index(2)] == sorted(stages[: stages.index(2)], key=lambda s: int(s or 0))


def test_then_moves_the_other_knobs_and_ends_at_a_local_best() -> None:
    strategy = Fast(SPACE, hints(predicts=True), 0)
    strategy.tell(ended(0, START, cost(START)))
    seen = drive(strategy, 60, cost)
    best = min((p for p in seen if cost(p)), key=lambda p: cost(p) or 9)
    assert best == {"stage": 2, "batch": 32, "extra": True} or cost(best) == cost(
        {"stage": 2, "batch": 32, "extra": True}
    )
    assert len(seen) < 30
    assert "strategy.early_stopping" in strategy.stop_reason


def test_growth_ends_on_a_plateau() -> None:
    strategy = Fast(SPACE, hints(predicts=False), 0)
    strategy.tell(ended(0, START, 1.0))
    seen = drive(strategy, 3, lambda point: 1.0)  # a larger batch gains nothing
    assert next(p["batch"] for p in seen if p["stage"] == 0) == 16
    assert all(int(p["batch"] or 0) <= 16 for p in seen)


def test_without_monotonic_knobs_it_moves_by_expected_effect() -> None:
    strategy = Fast(SPACE, Hints(START, effect_order=("extra", "batch")), 0)
    strategy.tell(ended(0, START, cost(START)))
    seen = drive(strategy, 2, cost)
    assert seen[0] == {**START, "extra": True}
    assert seen[1] == {**START, "extra": True, "batch": 2}


def advised_on(number: int, point: Mapping[str, Value], seconds: float) -> Trial:
    """A baseline that waits for its loader."""
    trial = ended(number, dict(point), seconds)
    trial.purpose = Purpose.BASELINE
    assert trial.measurement is not None
    trial.measurement.environment["causes"] = {"input_bound": ["unknown"]}
    return trial


LOADER = Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1, 2, 4))


def test_what_is_advised_on_the_baseline_comes_first() -> None:
    space = Space([SPACE.by_name["extra"], LOADER])
    start = {"extra": False, "dataloader_workers": 0}
    strategy = Fast(space, Hints(start, effect_order=("extra",)), 0)
    strategy.tell(advised_on(0, start, 0.02))
    assert strategy.ask() == {"extra": False, "dataloader_workers": 2}
    without = Fast(space, Hints(start, effect_order=("extra",)), 0)
    without.tell(ended(0, start, 0.02))
    assert without.ask() == {"extra": True, "dataloader_workers": 0}


def test_what_is_advised_comes_after_the_stages_and_from_their_best() -> None:
    space = Space([*SPACE.knobs, LOADER])
    start = {**START, "dataloader_workers": 0}
    known = replace(hints(predicts=True), baseline=start)
    strategy = Fast(space, known, 0)
    strategy.tell(advised_on(0, start, cost(start) or 1.0))
    seen = drive(strategy, 40, cost)
    first = next(p for p in seen if p["dataloader_workers"])
    before = seen[: seen.index(first)]
    assert {p["stage"] for p in before} == {0, 1, 2}
    assert not any(p["extra"] for p in before)
    best = min((p for p in before if cost(p)), key=lambda p: cost(p) or 9)
    assert first == {**best, "dataloader_workers": 2}


def test_num_trials_ends_it() -> None:
    strategy = Fast(SPACE, hints(predicts=True), 0, Fast.Options(num_trials=3))
    assert len(drive(strategy, 10, cost)) == 3
    assert "num_trials" in strategy.stop_reason


def test_on_a_recorded_surface_it_gets_within_two_percent() -> None:
    runner = Replay(Replay.Options(table=str(ZERO), noise=0), Environment(Path()))
    strategy = Fast(runner.space, runner.hints([]), 0)
    objective = Objective()

    def measured(point: Mapping[str, Value]) -> float | None:
        outcome = runner.measure(point, Plan(number=0))
        return None if outcome.status is not Status.OK else objective.cost(outcome.measurement)  # type: ignore[arg-type]

    strategy.tell(ended(0, runner.baseline, measured(runner.baseline)))
    costs = [measured(p) for p in drive(strategy, 40, measured)]
    assert 1 / min(c for c in costs if c is not None) > 0.98 * 252.5
