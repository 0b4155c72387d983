"""Samplers of Optuna, where it is installed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from perfsearch.core.hints import Hints
from perfsearch.core.knob import Knob, Value
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Trial
from perfsearch.strategies._candidates import Projection
from perfsearch.strategies._history import History
from perfsearch.strategies.base import Strategy


class Optuna(Strategy):
    """Optuna's tree-structured Parzen estimator or Gaussian process.

    A proposal that is infeasible or was tried stands for the nearest untried configuration.
    Failures are told as worse than anything measured; costs as logarithms.

    """

    requires: ClassVar = {"optuna": "optuna"}

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=optuna``.

        Attributes:
            sampler: ``tpe`` or ``gp``.
            startup_trials: random trials before the sampler's model is used.

        """

        sampler: Literal["tpe", "gp"] = "tpe"
        startup_trials: int = option(10, low=1)

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        import optuna

        self._history = History(space, seed)
        self._projection = Projection(space, self._history)
        self._running: dict[str, Any] = {}
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        number, startup = seed % 2**32, self.options.startup_trials
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: Any
            if self.options.sampler == "gp":
                sampler = optuna.samplers.GPSampler(
                    seed=number, n_startup_trials=startup, deterministic_objective=False
                )
            else:
                sampler = optuna.samplers.TPESampler(
                    seed=number, n_startup_trials=startup, multivariate=True, constant_liar=True
                )
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._distributions = {k.name: _distribution(optuna, k) for k in space.knobs}

    def ask(self) -> dict[str, Value] | None:
        """Return the sampler's proposal, or the nearest untried to it; ``None`` at the end."""
        trial = self._study.ask(self._distributions)
        values = {k.name: _value(k, trial.params[k.name]) for k in self.space.knobs}
        point = self._projection.nearest_untried(values)
        if point is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            self.stop_reason = self._history.why_none()
            return None
        if key_of(point) != key_of(values):
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial(self._parameters(point))
            trial = self._study.ask(self._distributions)
        self._running[key_of(point)] = trial
        return self._history.propose(point)

    def tell(self, trial: Trial) -> None:
        """Pass the result on to the study."""
        self._history.tell(trial)
        key = self._history.key(trial.configuration)
        if key is None:
            return
        running = self._running.pop(key, None)
        value = self._history.log_loss(trial)
        if running is not None and value is None:
            self._study.tell(running, state=self._optuna.trial.TrialState.FAIL)
        elif running is not None:
            self._study.tell(running, value)
        if running is not None or value is None:
            return
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=self._parameters(self.space.canonical(trial.configuration)),
                distributions=self._distributions,
                value=value,
            )
        )

    def describe(self) -> str:
        """One line for people."""
        return f"Optuna's {self.options.sampler} sampler, {len(self._history.trials)} trials told"

    def _parameters(self, point: dict[str, Value]) -> dict[str, Any]:
        return {k.name: _parameter(k, point[k.name]) for k in self.space.knobs}


_LISTED = 256
"""Values up to which an ordered knob is given to Optuna by the place of its value."""


def _goes_by_place(knob: Knob) -> bool:
    return knob.is_ordered and knob.count is not None and knob.count <= _LISTED


def _places(knob: Knob) -> tuple[Value, ...]:
    return knob.choices() or ()


def _distribution(optuna: Any, knob: Knob) -> Any:
    """Ordered knobs with a list go by place, long ranges by number, others by name."""
    kinds = optuna.distributions
    if not knob.is_ordered:
        return kinds.CategoricalDistribution(list(knob.values))
    if _goes_by_place(knob):
        return kinds.IntDistribution(0, len(_places(knob)) - 1)
    if knob.kind == "integer":
        assert knob.low is not None and knob.high is not None
        return kinds.IntDistribution(int(knob.low), int(knob.high), log=knob.log)
    return kinds.FloatDistribution(knob.low, knob.high, log=knob.log)


def _value(knob: Knob, parameter: Any) -> Value:
    value: Value = _places(knob)[int(parameter)] if _goes_by_place(knob) else parameter
    return value


def _parameter(knob: Knob, value: Value) -> Any:
    if _goes_by_place(knob):
        choices = _places(knob)
        place = knob.unit_position(value)
        return min(range(len(choices)), key=lambda i: abs(knob.unit_position(choices[i]) - place))
    return value
