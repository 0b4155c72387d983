"""The order of proposals where some changes take a new process group or new processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Kind, Knob, Part, Scope, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.strategies import Strategy, load
from perfsearch.strategies._history import History
from perfsearch.strategies._prices import Prices

SECONDS = {Scope.STEP: 1.0, Scope.GROUP: 3.0, Scope.PROCESS: 20.0}
SPACE = Space(
    [
        Knob("bucket", Kind.ORDINAL, 4, (1, 2, 4, 8, 16)),
        Knob("view", Kind.BOOLEAN, False),
        Knob("tree", Kind.BOOLEAN, False, scope=Scope.GROUP),
        Knob("threads", Kind.ORDINAL, 1, (1, 2, 4), scope=Scope.PROCESS),
        Knob("sockets", Kind.ORDINAL, 1, (1, 2, 4), scope=Scope.PROCESS),
    ]
)
BASELINE: dict[str, Value] = {k.name: k.default for k in SPACE.knobs}


def cost(point: Mapping[str, Value]) -> float:
    away = abs(math.log2(int(point["bucket"] or 1) / 8))
    total = 0.05 * away - 0.03 * bool(point["view"]) - 0.02 * bool(point["tree"])
    return 0.1 * math.exp(total - 0.02 * int(point["threads"] or 0))


def scope_of(before: Trial | None, point: Mapping[str, Value]) -> Scope:
    """What a runner must restart to measure ``point`` after the trial before it."""
    if before is None or before.status.has_failed:
        return Scope.PROCESS
    changed = [k.scope for k in SPACE.knobs if before.configuration[k.name] != point[k.name]]
    return max(changed, key=list(Scope).index, default=Scope.STEP)


def ran(number: int, point: Mapping[str, Value], before: Trial | None, aware: bool = True) -> Trial:
    """A trial on a clock that goes on by the price of what changed."""
    scope = scope_of(before, point)
    measurement = Measurement([cost(point)] * 5, 1)
    trial = Trial(number, dict(point), Purpose.SEARCH, Status.OK, measurement, cost(point))
    trial.cost_error, trial.fresh_process = 0.01, scope is Scope.PROCESS
    if aware:
        trial.seconds = SECONDS[scope] + 5 * cost(point)
        trial.overhead_seconds = SECONDS[scope]
    return trial


def searched(strategy: Strategy, asks: int, aware: bool = True) -> list[Scope]:
    """Scopes that the proposals change, in order, the baseline apart."""
    before = ran(0, BASELINE, None, aware)
    strategy.tell(before)
    scopes = []
    for number in range(1, asks + 1):
        point = strategy.ask()
        if point is None:
            break
        scopes.append(scope_of(before, point))
        before = ran(number, point, before, aware)
        strategy.tell(before)
    return scopes


def told(trials: list[Trial]) -> Prices:
    history = History(SPACE, 0)
    for trial in trials:
        history.tell(trial)
    return Prices(SPACE, history)


def seconds(prices: Prices, *points: Mapping[str, Value]) -> list[float]:
    return [float(s) for s in prices.seconds(SPACE.encode(points))]


STEP, GROUP, PROCESS = (
    {**BASELINE, "bucket": 8},
    {**BASELINE, "bucket": 8, "tree": True},
    {**BASELINE, "tree": True, "threads": 2},
)


def test_a_price_is_learned_for_each_scope() -> None:
    trials = [ran(0, BASELINE, None)]
    for number, point in enumerate((STEP, BASELINE, {**BASELINE, "tree": True}, BASELINE), 1):
        trials.append(ran(number, point, trials[-1]))
    step, group, process = seconds(told(trials), STEP, GROUP, PROCESS)
    assert step == pytest.approx(1 + 5 * cost(STEP), rel=0.2)
    assert group == pytest.approx(3 + 5 * cost(GROUP), rel=0.2)
    assert process == pytest.approx(20 + 5 * cost(BASELINE))


def test_before_it_is_seen_a_change_between_steps_is_taken_for_the_steps_alone() -> None:
    baseline = ran(0, BASELINE, None)
    step, group, process = seconds(told([baseline]), STEP, GROUP, PROCESS)
    assert step == pytest.approx(5 * cost(BASELINE))
    assert step < group < process == baseline.seconds


def test_where_a_runner_starts_anew_for_all_every_change_costs_the_same() -> None:
    trials = [ran(0, BASELINE, None)]
    for number in range(1, 5):
        point = {**BASELINE, "bucket": (1, 2, 8, 16)[number - 1]}
        trials.append(replace(ran(number, point, None), number=number))
    prices = told(trials)
    step, process = seconds(prices, STEP, PROCESS)
    assert step == pytest.approx(process, rel=0.1)
    assert prices.cheap(SPACE.encode([STEP, PROCESS])).all()


def test_one_start_that_no_knob_asked_for_says_nothing_of_the_next() -> None:
    after_profile = ran(1, STEP, None)
    prices = told([ran(0, BASELINE, None), after_profile])
    assert seconds(prices, BASELINE)[0] < 1


@pytest.mark.parametrize("status", [Status.OOM, Status.CRASH, Status.KILLED])
def test_after_a_failure_everything_takes_a_new_start(status: Status) -> None:
    failed = Trial(1, STEP, Purpose.SEARCH, status, seconds=500.0)
    prices = told([ran(0, BASELINE, None), failed])
    step, process = seconds(prices, BASELINE, PROCESS)
    assert step == process == pytest.approx(20 + 5 * cost(BASELINE))


def test_without_seconds_all_cost_the_same() -> None:
    trials = [ran(0, BASELINE, None, aware=False)]
    assert seconds(told(trials), STEP, GROUP, PROCESS) == [1, 1, 1]
    assert seconds(told([]), STEP) == [1]


def test_what_is_screened_or_told_again_was_not_run() -> None:
    first, second = ran(0, BASELINE, None), ran(1, STEP, ran(0, BASELINE, None))
    refused = Trial(-1, {**BASELINE, "threads": 4}, Purpose.SEARCH, Status.INVALID)
    plain = seconds(told([first, second]), STEP, GROUP, PROCESS)
    assert seconds(told([first, second, refused, first]), STEP, GROUP, PROCESS) == plain


def test_proposals_that_wait_are_what_the_next_one_meets() -> None:
    history = History(SPACE, 0)
    history.tell(ran(0, BASELINE, None))
    prices = Prices(SPACE, history)
    elsewhere = {**BASELINE, "threads": 4}
    assert seconds(prices, elsewhere)[0] > 20
    history.propose({**elsewhere, "bucket": 1})
    assert seconds(prices, elsewhere)[0] < 1


@pytest.mark.parametrize("name", ["auto", "bayes", "fast"])
def test_what_a_running_job_can_change_is_tried_before_a_new_start(name: str) -> None:
    def first_start(aware: bool) -> int:
        kind = load(name)
        order = ("threads", "sockets", "tree", "view", "bucket")
        strategy = kind(SPACE, Hints(dict(BASELINE), effect_order=order), 0)
        return searched(strategy, 12, aware).index(Scope.PROCESS)

    assert first_start(aware=True) >= 4 > first_start(aware=False)


@pytest.mark.parametrize("name", ["auto", "bayes", "fast"])
def test_what_takes_a_new_start_is_searched_too(name: str) -> None:
    kind = load(name)
    scopes = searched(kind(SPACE, Hints(dict(BASELINE)), 0), 30)
    assert Scope.PROCESS in scopes
    assert scopes.count(Scope.PROCESS) < len(scopes) / 2


def test_fast_moves_all_that_takes_a_new_start_together() -> None:
    strategy = load("fast")(SPACE, Hints(dict(BASELINE)), 0)
    before = ran(0, BASELINE, None)
    strategy.tell(before)
    while (point := strategy.ask()) is not None:
        if scope_of(before, point) is Scope.PROCESS:
            break
        before = ran(before.number + 1, point, before)
        strategy.tell(before)
    assert point is not None
    assert (point["threads"], point["sockets"]) == (2, 2)


def test_starts_of_the_runner_go_by_price() -> None:
    starts = ({**BASELINE, "threads": 4}, {**BASELINE, "view": True})
    for name in ("bayes", "fast"):
        strategy = load(name)(SPACE, Hints(dict(BASELINE), starts=starts), 0)
        strategy.tell(ran(0, BASELINE, None))
        assert strategy.ask() == starts[1]


def test_a_gain_too_small_for_a_trial_is_not_taken_for_being_cheap() -> None:
    strategy = load("bayes")(SPACE, Hints(dict(BASELINE)), 0)
    gain, price = np.array([1e-4, 0.02, 0.01]), np.array([0.001, 20.0, 1.0])
    assert strategy._most_a_second(gain, price) == 2
    assert strategy._most_a_second(gain / 1e3, price) == 1


def test_nothing_is_dear_where_whatever_comes_next_starts_processes() -> None:
    first = ran(0, BASELINE, None)
    second = ran(1, {**BASELINE, "view": True}, first)
    rows = SPACE.encode([{**BASELINE, "bucket": 8}, {**BASELINE, "threads": 2}])
    assert told([first, second]).dear(rows).tolist() == [False, True]
    second.status = Status.CRASH
    assert told([first, second]).dear(rows).tolist() == [False, False]


# -----------------------------------------------------------------------------
# What costs a new start, where something is expected of it.

COMPILED = Space(
    [
        Knob("workers", Kind.ORDINAL, 4, (2, 4, 8), scope=Scope.PROCESS, shortens=(Part.LOADING,)),
        Knob("threads", Kind.ORDINAL, 1, (1, 2, 4), scope=Scope.PROCESS),
        Knob("mode", Kind.CATEGORICAL, "none", ("none", "default", "graphs"), scope=Scope.PROCESS),
        Knob("layout", Kind.BOOLEAN, False),
        Knob("optimizer", Kind.CATEGORICAL, "loop", ("loop", "foreach", "fused")),
    ]
)
AS_IT_IS: dict[str, Value] = {k.name: k.default for k in COMPILED.knobs}
GAINS = {("layout", True): 0.7, ("optimizer", "fused"): 0.95, ("mode", "default"): 0.8}


def starts_of(order: tuple[str, ...], loading_ms: float) -> list[dict[str, Value]]:
    """What the first trials that take a new start change, on a job that layout and mode help."""
    strategy = load("bayes")(COMPILED, Hints(AS_IT_IS, effect_order=order), 0)
    before, found = AS_IT_IS, []
    for number in range(14):
        point = strategy.ask() if number else AS_IT_IS
        if point is None:
            break
        step_s = 0.1 * math.prod(GAINS.get(item, 1.0) for item in point.items())
        starts = any(before[k.name] != point[k.name] for k in COMPILED.knobs[:3])
        if starts:
            found.append({k: v for k, v in point.items() if v != AS_IT_IS[k]})
        purpose = Purpose.SEARCH if number else Purpose.BASELINE
        evidence = {"with_everything_ms": 100.0, "loading_alone": 1.0}
        phases = {"dataloader_next": loading_ms}
        measurement = Measurement(
            [step_s] * 5, 1, phases_ms=phases, bottleneck_evidence=dict(evidence)
        )
        trial = Trial(number, dict(point), purpose, Status.OK, measurement, step_s)
        trial.cost_error = 0.002
        trial.seconds = (1.0 if number and not starts else 20.0) + 5 * step_s
        trial.overhead_seconds = trial.seconds - 5 * step_s
        trial.fresh_process = starts or not number
        strategy.tell(trial)
        before = point
    return found


def test_the_first_new_start_is_the_best_so_far_with_the_dear_knob_of_the_largest_effect() -> None:
    found = starts_of(("mode", "threads", "workers", "layout", "optimizer"), loading_ms=30.0)
    assert found[0]["mode"] == "default"
    assert found[0]["layout"] is True
    assert not {"workers", "threads"} & found[0].keys()


def test_a_new_start_for_what_can_gain_nothing_comes_after_those_that_may() -> None:
    found = starts_of(("workers", "mode", "threads", "layout", "optimizer"), loading_ms=0.1)
    assert found[0]["mode"] == "default"
    assert "workers" not in found[0]
    told = starts_of(("workers", "mode", "threads", "layout", "optimizer"), loading_ms=30.0)
    assert "workers" in told[0]
