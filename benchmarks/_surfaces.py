"""Surfaces with a known truth: recorded tables, and four synthetic ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Configuration, Kind, Knob, Scope, Value, same_value
from perfsearch.core.objective import Objective, log_cost_error
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.gpu import MEMORY_GIB
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay

DATA = Path(__file__).parents[1] / "tests" / "data"
FACTS = {"zero_gpt2large_4xh100": "zero_gpt2large_facts.json"}
"""Facts of the trained model's tensors, without which ``runner=zero`` predicts no memory."""


@dataclass
class Surface:
    """A space whose true costs are known.

    Attributes:
        name: for tables and the store.
        space: the searched space.
        baseline: trial 0.
        hints: what a runner would tell, given a list that the trials are added to.
        tolerance: a configuration is good enough within this share of the best throughput.
        measure: number and configuration to an observed trial, given a seed; with prices it
            follows on the trial before, trial 0 on none.
        truth: true cost of a configuration, ``None`` for a failure.
        best: the least true cost.
        is_priced: whether a trial takes the seconds of what must restart for it, too.

    """

    name: str
    space: Space
    baseline: dict[str, Value]
    hints: Callable[[list[Trial]], Hints]
    tolerance: float
    measure: Callable[[Configuration, int, int], Trial]
    truth: Callable[[Configuration], float | None]
    best: float
    is_priced: bool = False

    def quality(self, configuration: Configuration) -> float:
        """Share of the best throughput, 0 for a failure."""
        cost = self.truth(configuration)
        return 0.0 if cost is None else self.best / cost


def recorded(path: Path, tolerance: float = 0.02) -> Surface:
    """The surface of a table, served with the noise of its raw step times."""
    objective = Objective()
    facts = FACTS.get(path.stem)
    options = Replay.Options(
        table=str(path),
        model_facts=None if facts is None else str(DATA / facts),
        device_memory_gib=MEMORY_GIB["H100"],
    )
    runners: dict[int, Replay] = {}

    def runner(seed: int) -> Replay:
        if seed not in runners:
            runners.clear()
            runners[seed] = Replay(options, Environment(Path(), seed=seed))
        return runners[seed]

    first = runner(0)
    points = first.space.listed() or []

    def measure(configuration: Configuration, number: int, seed: int) -> Trial:
        outcome = runner(seed).measure(configuration, Plan(number=number))
        trial = Trial(number, dict(configuration), Purpose.SEARCH, outcome.status)
        trial.measurement, trial.reason = outcome.measurement, outcome.reason
        trial.seconds = float(outcome.extra.get("trial_seconds", 0.0))
        if outcome.measurement is not None:
            trial.cost = objective.cost(outcome.measurement)
            trial.cost_error = log_cost_error(outcome.measurement)
            trial.seconds = trial.seconds or sum(outcome.measurement.step_seconds)
        return trial

    batches = {
        key_of(p): m.samples_per_step
        for p in points
        if (m := first.measure(p, Plan(number=0)).measurement) is not None
    }
    costs: dict[str, float | None] = {}
    for point in points:
        seconds = first.true_step_seconds(point)
        costs[key_of(point)] = None if seconds is None else seconds / batches[key_of(point)]
    best = min(cost for cost in costs.values() if cost is not None)
    return Surface(
        path.stem,
        first.space,
        first.baseline,
        first.hints,
        tolerance,
        measure,
        lambda configuration: costs[key_of(configuration)],
        best,
    )


def _synthetic(
    name: str,
    knobs: list[Knob],
    seconds: Callable[[Mapping[str, float], Configuration], float | None],
    noise: float,
    drift: float,
) -> Surface:
    """A surface from a formula: ``seconds`` gets unit positions and the configuration itself."""
    space = Space(knobs)
    baseline: dict[str, Value] = {k.name: k.default for k in knobs}

    def truth(configuration: Configuration) -> float | None:
        places = {k.name: k.unit_position(configuration[k.name]) for k in knobs if k.is_ordered}
        return seconds(places, configuration)

    def measure(configuration: Configuration, number: int, seed: int) -> Trial:
        true = truth(configuration)
        if true is None:
            return Trial(
                number,
                dict(configuration),
                Purpose.SEARCH,
                Status.CRASH,
                reason="forbidden",
                seconds=3.0,
            )
        words = f"{seed}|{number}|{key_of(configuration)}".encode()
        generator = np.random.default_rng(
            int.from_bytes(hashlib.blake2b(words).digest()[:16], "big")
        )
        shared = math.exp(drift * generator.standard_normal())
        steps = [true * shared * math.exp(noise * z) for z in generator.standard_normal(10)]
        measurement = Measurement(step_seconds=steps, samples_per_step=1)
        trial = Trial(number, dict(configuration), Purpose.SEARCH, Status.OK, measurement)
        trial.cost = Objective().cost(measurement)
        trial.cost_error = log_cost_error(measurement)
        trial.seconds = sum(steps)
        return trial

    costs = [truth(point) for point in space.listed() or []]
    best = min(cost for cost in costs if cost is not None)
    return Surface(
        name, space, baseline, lambda trials: Hints(baseline), 0.02, measure, truth, best
    )


def _ordinal(name: str, values: list[float], default: float) -> Knob:
    return Knob(name, Kind.ORDINAL, default=default, values=tuple(values))


def interactions() -> Surface:
    """Seven knobs; what is best for one depends on two others. 3% noise between steps."""
    knobs = [
        _ordinal("bucket", [2.0**i for i in range(10)], 32.0),
        _ordinal("threads", [1, 2, 4, 8], 1),
        _ordinal("prefetch", [1, 2, 4, 8], 2),
        Knob("algorithm", Kind.CATEGORICAL, "ring", ("ring", "tree", "split")),
        Knob("protocol", Kind.CATEGORICAL, "simple", ("simple", "ll", "ll128")),
        Knob("fused", Kind.BOOLEAN, False),
        Knob("static", Kind.BOOLEAN, False),
    ]

    def seconds(u: Mapping[str, float], c: Configuration) -> float:
        center = {"ring": 0.75, "tree": 0.35, "split": 0.55}[str(c["algorithm"])]
        cost = 0.30 * (u["bucket"] - center) ** 2 * 4
        cost += {"ring": 0.10, "tree": 0.06, "split": 0.0}[str(c["algorithm"])]
        cost += {"simple": 0.05, "ll": 0.12, "ll128": 0.0}[str(c["protocol"])]
        if c["algorithm"] == "split" and c["protocol"] == "ll128":
            cost += 0.12
        cost += 0.15 * (u["threads"] - (0.67 if c["fused"] else 0.33)) ** 2
        cost += 0.0 if c["fused"] else 0.04
        cost += 0.05 * (1 - u["prefetch"]) ** 2
        cost += -0.03 if c["static"] and not c["fused"] else 0.0
        return 0.1 * math.exp(cost)

    return _synthetic("interactions", knobs, seconds, noise=0.03, drift=0.01)


def half_space() -> Surface:
    """Five knobs; more than half of the space fails, and the best point lies at the border."""
    levels = [2.0**i for i in range(8)]
    knobs = [
        _ordinal("width", levels, 1.0),
        _ordinal("depth", levels, 1.0),
        _ordinal("workers", [0, 1, 2, 4, 8], 0),
        Knob("mode", Kind.CATEGORICAL, "a", ("a", "b", "c")),
        Knob("pinned", Kind.BOOLEAN, False),
    ]

    def seconds(u: Mapping[str, float], c: Configuration) -> float | None:
        load = u["width"] + 0.8 * u["depth"] + (0.15 if c["mode"] == "c" else 0.0)
        if load > 0.95:
            return None
        cost = -0.9 * u["width"] - 0.6 * u["depth"] - 0.10 * u["workers"]
        cost += {"a": 0.08, "b": 0.0, "c": -0.05}[str(c["mode"])]
        cost += 0.0 if c["pinned"] else 0.03
        return 0.3 * math.exp(cost)

    return _synthetic("half_space", knobs, seconds, noise=0.02, drift=0.01)


def ridge() -> Surface:
    """Three knobs whose good values lie on a narrow diagonal ridge. 2% noise between steps."""
    levels = [float(round(1.25**i, 3)) for i in range(24)]
    knobs = [
        _ordinal("chunk", levels, 1.0),
        _ordinal("window", levels, 1.0),
        Knob("mode", Kind.CATEGORICAL, "a", ("a", "b")),
    ]

    def seconds(u: Mapping[str, float], c: Configuration) -> float:
        across = u["chunk"] - u["window"] + (0.15 if c["mode"] == "b" else -0.1)
        along = u["chunk"] + u["window"] - 1.2
        return 0.1 * math.exp(0.5 * (1 - math.exp(-((across / 0.08) ** 2))) + 0.15 * along**2)

    return _synthetic("ridge", knobs, seconds, noise=0.02, drift=0.01)


def ridge_tuning() -> Surface:
    """A ridge of the same kind with other numbers, to tune on. 2% noise between steps."""
    knobs = [
        _ordinal("tile", [float(round(1.3**i, 3)) for i in range(20)], 1.0),
        _ordinal("depth", [float(round(1.2**i, 3)) for i in range(22)], 1.0),
        Knob("mode", Kind.CATEGORICAL, "a", ("a", "b", "c")),
    ]

    def seconds(u: Mapping[str, float], c: Configuration) -> float:
        shift = {"a": 0.0, "b": 0.2, "c": -0.1}[str(c["mode"])]
        across = u["tile"] + 0.8 * u["depth"] - 0.95 + shift
        along = u["tile"] - u["depth"] + 0.4
        return 0.1 * math.exp(0.45 * (1 - math.exp(-((across / 0.09) ** 2))) + 0.2 * along**2)

    return _synthetic("ridge_tuning", knobs, seconds, noise=0.02, drift=0.01)


PRICED = "_priced"
"""Behind the name of a surface: with prices by scope."""

SCOPES: Mapping[str, Mapping[str, Scope]] = {
    "ddp_gpt2small_4xh100_tcp": {
        "hierarchical_allreduce": Scope.GROUP,
        "nccl_nsocks_perthread": Scope.PROCESS,
        "nccl_socket_nthreads": Scope.PROCESS,
    },
    "zero_gpt2large_4xh100": {
        "micro_batch": Scope.PROCESS,
        "gradient_accumulation": Scope.PROCESS,
        "activation_checkpointing": Scope.PROCESS,
    },
    "interactions": {
        "threads": Scope.PROCESS,
        "algorithm": Scope.GROUP,
        "protocol": Scope.GROUP,
    },
    "half_space": {"workers": Scope.PROCESS, "pinned": Scope.PROCESS, "mode": Scope.GROUP},
    "ridge": {"window": Scope.PROCESS},
}
"""What must restart for a knob, where that is more than the wrapper: in the first table as with
``runner=ddp``, in the second as in a script, whose arguments take a new start."""

SECONDS = {Scope.STEP: 0.5, Scope.GROUP: 2.0, Scope.PROCESS: 12.0}
"""What a change takes beside the scored steps; twelve seconds are a small script's new start."""


def priced(surface: Surface) -> Surface:
    """The surface with a scope for each knob, and prices to match."""
    scopes = SCOPES[surface.name]
    knobs = [replace(k, scope=scopes.get(k.name, Scope.STEP)) for k in surface.space.knobs]
    space = Space(knobs, points=surface.space.listed() or [])
    before: Trial | None = None

    def measure(configuration: Configuration, number: int, seed: int) -> Trial:
        nonlocal before
        trial = surface.measure(configuration, number, seed)
        charge(space, trial, before if number else None)
        before = trial
        return trial

    name = surface.name + PRICED
    return replace(surface, name=name, space=space, measure=measure, is_priced=True)


def charge(space: Space, trial: Trial, before: Trial | None) -> None:
    """Add to a trial's seconds those of what must restart after the trial before it."""
    scope = Scope.PROCESS
    trial.fresh_process = before is None or before.status.has_failed
    if before is not None and not trial.fresh_process:
        order = list(Scope)
        changed = [k.scope for k in space.knobs if differs(k.name, before, trial)]
        scope = max(changed, key=order.index, default=Scope.STEP)
        trial.fresh_process = scope is Scope.PROCESS
    steps_s = sum(trial.measurement.step_seconds) if trial.measurement else 0.0
    trial.seconds, trial.overhead_seconds = SECONDS[scope] + steps_s, SECONDS[scope]


def differs(name: str, one: Trial, other: Trial) -> bool:
    """Whether two trials have another value of a knob."""
    return not same_value(one.configuration[name], other.configuration[name])


def surfaces() -> dict[str, Callable[[], Surface]]:
    """Makers of every surface by name: measured tables of ``tests/data``, then synthetic ones.

    Tables over TCP are judged by 5%: their configurations were visited once, and visits differ.
    A search's own trials (``*_search.csv``) are no surface: some two dozen points of an endless
    space, chosen by a strategy of ours, so that peers could propose nothing that has a row.
    """
    makers: dict[str, Callable[[], Surface]] = {}
    for path in sorted(DATA.glob("*.csv")):
        if path.stem.endswith("_search"):
            continue
        tolerance = 0.05 if "tcp" in path.stem else 0.02
        makers[path.stem] = lambda path=path, tolerance=tolerance: recorded(path, tolerance)
    synthetic = (interactions, half_space, ridge, ridge_tuning)
    makers.update({maker.__name__: maker for maker in synthetic})
    for name in SCOPES:
        makers[name + PRICED] = lambda make=makers[name]: priced(make())
    return makers
