"""Peers as their own projects run them, behind one pair of calls: propose, and take the answer.

Every peer gets the baseline's cost before its first proposal where it can take one. Infeasible
proposals cost a peer nothing (they are told as failures and it proposes again, up to 50 times),
except for a contender whose name ends in ``_paid``, which pays a trial for each; repeats cost a
trial, as they would without a record. Failures are told as the worst cost so far.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from _surfaces import Surface

from perfsearch.core.knob import Knob, Value
from perfsearch.core.space import key_of
from perfsearch.core.trial import Trial

Point = dict[str, Value]


class Peer(Protocol):
    """What a contender must offer."""

    def propose(self) -> Point | None:
        """Return the next configuration, ``None`` when done."""

    def answer(self, point: Point, loss: float, failed: bool) -> None:
        """Take the logarithm of the cost; for a failure, of the worst so far."""


class OptunaPeer:
    """Optuna's samplers with their own defaults; ordered knobs as integers, others by name."""

    def __init__(self, surface: Surface, seed: int, sampler: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore")
        self._optuna = optuna
        self._knobs = surface.space.knobs
        kinds: dict[str, Any] = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed, deterministic_objective=False),
        }
        self._study = optuna.create_study(sampler=kinds[sampler]())
        self._distributions = {k.name: self._distribution(k) for k in self._knobs}
        self._trial: Any = None

    def _distribution(self, knob: Knob) -> Any:
        values = list(knob.choices() or ())
        if knob.is_ordered and len(values) > 2:
            return self._optuna.distributions.IntDistribution(0, len(values) - 1)
        return self._optuna.distributions.CategoricalDistribution(values)

    def propose(self) -> Point:
        self._trial = self._study.ask(self._distributions)
        point: Point = {}
        for knob in self._knobs:
            value = self._trial.params[knob.name]
            ordered = knob.is_ordered and len(knob.choices() or ()) > 2
            point[knob.name] = (knob.choices() or ())[value] if ordered else value
        return point

    def answer(self, point: Point, loss: float, failed: bool) -> None:
        if self._trial is not None:
            self._study.tell(self._trial, loss)
            self._trial = None
            return
        parameters = {}
        for knob in self._knobs:
            values = list(knob.choices() or ())
            ordered = knob.is_ordered and len(values) > 2
            place = values.index(point[knob.name])
            parameters[knob.name] = place if ordered else point[knob.name]
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=parameters, distributions=self._distributions, value=loss
            )
        )


class NevergradPeer:
    """A Nevergrad optimizer; ordered knobs as transition choices."""

    def __init__(self, surface: Surface, seed: int, optimizer: str, budget: int) -> None:
        import nevergrad

        warnings.simplefilter("ignore")
        kinds = {}
        for knob in surface.space.knobs:
            values = list(knob.choices() or ())
            ordered = knob.is_ordered and len(values) > 2
            kinds[knob.name] = (
                nevergrad.p.TransitionChoice(values) if ordered else nevergrad.p.Choice(values)
            )
        space = nevergrad.p.Dict(**kinds)
        space.random_state.seed(seed)
        self._optimizer = nevergrad.optimizers.registry[optimizer](space, budget=budget)
        self._candidate: Any = None

    def propose(self) -> Point:
        self._candidate = self._optimizer.ask()
        return dict(self._candidate.value)

    def answer(self, point: Point, loss: float, failed: bool) -> None:
        if self._candidate is None:
            self._optimizer.suggest(point)
            self._candidate = self._optimizer.ask()
        self._optimizer.tell(self._candidate, loss)
        self._candidate = None


class HorovodPeer:
    """Horovod's schedule: for each combination of the unordered knobs a search of its own.

    Each inner search starts from four points on the diagonal and then takes expected improvement
    (xi 0.01) under a Gaussian process with one length scale and noise 0.8, 21 samples in all, on
    linear scales. Its 25 restarts are replaced by the whole grid.
    """

    def __init__(self, surface: Surface, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        knobs = surface.space.knobs
        self._inner = [k for k in knobs if k.is_ordered]
        outer = [k for k in knobs if not k.is_ordered]
        self._outer = [k.name for k in outer]
        choices = [list(k.choices() or ()) for k in reversed(outer)]  # the first varies fastest
        self._combinations = [tuple(reversed(c)) for c in itertools.product(*choices)]
        values = [list(k.choices() or ()) for k in self._inner]
        self._grid = list(itertools.product(*values))
        raw = np.array([[float(v) for v in row] for row in self._grid])
        span = np.ptp(raw, axis=0)
        self._rows = (raw - raw.min(axis=0)) / np.where(span > 0, span, 1.0)
        self._rows *= 64.0  # one length scale over ranges of its own size, not of the unit cube
        self._samples: list[tuple[int, float]] = []
        self._place = 0

    def propose(self) -> Point | None:
        if len(self._samples) >= 21:
            self._samples = []
            self._combinations.pop(0)
        if not self._combinations:
            return None
        if len(self._samples) < 4:
            share = (0.06, 0.5, 0.25, 0.12)[len(self._samples)] * 64.0
            self._place = int(np.argmin(((self._rows - share) ** 2).sum(axis=1)))
        else:
            self._place = self._by_improvement()
        point: Point = dict(zip(self._outer, self._combinations[0], strict=True))
        point.update(zip([k.name for k in self._inner], self._grid[self._place], strict=True))
        return point

    def answer(self, point: Point, loss: float, failed: bool) -> None:
        if self._combinations and all(
            point[n] == v for n, v in zip(self._outer, self._combinations[0], strict=True)
        ):
            self._samples.append((self._place, math.exp(-loss)))

    def _by_improvement(self) -> int:
        from scipy.stats import norm
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        rows = self._rows[[i for i, _ in self._samples]]
        score = np.array([s for _, s in self._samples])
        score = (score - score.mean()) / (score.std() or 1.0)
        kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e3))
        warnings.simplefilter("ignore")
        model = GaussianProcessRegressor(kernel, alpha=0.64).fit(rows, score)
        best = model.predict(rows).max()
        mean, deviation = model.predict(self._rows, return_std=True)
        gain = mean - best - 0.01
        ratio = gain / np.maximum(deviation, 1e-9)
        expected = gain * norm.cdf(ratio) + deviation * norm.pdf(ratio)
        return int(np.argmax(expected + 1e-12 * self._generator.random(len(expected))))


class DeepSpeedPeer:
    """DeepSpeed's tuners over the listed space: ``grid``, ``random``, ``model``.

    The model-based one fits boosted trees to throughput over the largest so far, on numeric
    features, and takes the best predicted, one proposal in five at random; scikit-learn's trees
    (depth 3, rate 0.3) stand for XGBoost's pairwise ranking. Its two first trials are the first
    of the list and a random one, and both are run, which DeepSpeed by mistake does not. Its early
    stopping after five trials is left out.
    """

    def __init__(self, surface: Surface, seed: int, tuner: str) -> None:
        self._generator = np.random.default_rng(seed)
        self._points = list(surface.space.listed() or [])
        self._rows = surface.space.encode(self._points)
        self._tuner = tuner
        self._open = list(range(len(self._points)))
        self._seen: dict[int, float] = {}
        self._places = {key_of(p): i for i, p in enumerate(self._points)}

    def propose(self) -> Point | None:
        if not self._open:
            return None
        asked = len(self._points) - len(self._open)
        if self._tuner == "grid" or (self._tuner == "model" and asked == 0):
            place = self._open[0]
        elif self._tuner == "random" or asked < 2 or self._generator.random() < 0.2:
            place = self._open[int(self._generator.integers(len(self._open)))]
        else:
            place = self._predicted()
        self._open.remove(place)
        return self._points[place]

    def answer(self, point: Point, loss: float, failed: bool) -> None:
        self._seen[self._places[key_of(point)]] = 0.0 if failed else math.exp(-loss)

    def _predicted(self) -> int:
        from sklearn.ensemble import GradientBoostingRegressor

        places = list(self._seen)
        score = np.array(list(self._seen.values()))
        model = GradientBoostingRegressor(
            max_depth=3, learning_rate=0.3, random_state=0, n_estimators=50
        )
        model.fit(self._rows[places], score / (score.max() or 1.0))
        return self._open[int(np.argmax(model.predict(self._rows[self._open])))]


class OwnPeer:
    """A strategy of perfsearch with its default options.

    Args:
        surface: what is searched.
        seed: of the strategy.
        name: of the strategy.
        hinted: whether it gets what the runner of the surface's knobs knows; peers have no such
            thing.
        priced: whether it is told how many seconds each trial took.

    """

    def __init__(
        self, surface: Surface, seed: int, name: str, hinted: bool = True, priced: bool = True
    ) -> None:
        from perfsearch.core.hints import Hints
        from perfsearch.strategies import load

        self._trials: list[Trial] = []
        self._priced = priced
        hints = surface.hints(self._trials) if hinted else Hints(dict(surface.baseline))
        self.strategy = load(name)(surface.space, hints, seed)

    def propose(self) -> Point | None:
        return self.strategy.ask()

    def tell(self, trial: Trial) -> None:
        """Own strategies take whole trials."""
        if not self._priced:
            trial = replace(trial, seconds=0.0, overhead_seconds=0.0)
        self._trials.append(trial)
        self.strategy.tell(trial)


def contender(name: str, surface: Surface, seed: int, budget: int) -> Peer | OwnPeer:
    """The contender ``name``: ``optuna_tpe``, ``ng_NAME``, ``ds_TUNER``, ``horovod``, an own
    strategy, or one with ``_unhinted``, ``_unpriced`` or both behind its name.
    """
    kind, _, rest = name.removesuffix("_paid").partition("_")
    if kind == "optuna" and rest:
        return OptunaPeer(surface, seed, rest)
    if kind == "ng":
        return NevergradPeer(surface, seed, rest, budget)
    if kind == "ds":
        return DeepSpeedPeer(surface, seed, rest)
    if kind == "horovod":
        return HorovodPeer(surface, seed)
    own, *without = name.split("_un")
    return OwnPeer(surface, seed, own, "hinted" not in without, "priced" not in without)
