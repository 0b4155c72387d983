"""Evolutionary optimizers of Nevergrad."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsearch.core.errors import nearest
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Knob, Value
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Trial
from perfsearch.strategies._candidates import Projection
from perfsearch.strategies._history import History
from perfsearch.strategies.base import Strategy

ALLOWED = (
    "CMA",
    "DE",
    "DiagonalCMA",
    "DiscreteBSOOnePlusOne",
    "DiscreteOnePlusOne",
    "DoubleFastGADiscreteOnePlusOne",
    "NGOpt",
    "NgIohTuned",
    "NoisyDiscreteOnePlusOne",
    "OnePlusOne",
    "OptimisticDiscreteOnePlusOne",
    "PSO",
    "PortfolioDiscreteOnePlusOne",
    "RecombiningPortfolioDiscreteOnePlusOne",
    "TBPSA",
    "TwoPointsDE",
)
"""Optimizers that the tests run."""

_NUMPY = "it fails on numpy 2.4 and newer with nevergrad 1.0.12 (float() of an array)"

REFUSED: Mapping[str, str] = {
    "BO": "it fails on mixed spaces (must be real number, not NoneType) and takes seconds a trial",
    "MetaModel": _NUMPY,
    "MetaModelDE": _NUMPY,
    "MetaModelOnePlusOne": _NUMPY,
    "NGOpt8": _NUMPY,
    "NGOpt10": _NUMPY,
    "NGOptRW": "it hangs when several proposals are outstanding",
}
"""Optimizers that are known to break, and how."""

_REPEATS = 20
"""Repeats served from the history in one ask, after which the nearest untried is taken."""


class Nevergrad(Strategy):
    """Any of the tested optimizers; ordered knobs are transition choices, others plain choices.

    Feasibility is by enumeration: an infeasible proposal stands for the nearest feasible
    configuration. Repeated proposals are answered from the history. Failures are told as a finite
    penalty, worse than anything measured. Costs are told as logarithms.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=nevergrad``.

        Attributes:
            optimizer: a name of ``ALLOWED``.
            planned_trials: the budget that the optimizer plans for; it does not end the search.

        """

        optimizer: str = "TwoPointsDE"
        planned_trials: int = option(60, low=1)

        def __post_init__(self) -> None:
            if self.optimizer in REFUSED:
                raise ValueError(
                    f"strategy.optimizer={self.optimizer}: refused, {REFUSED[self.optimizer]}. "
                    f"Allowed: {', '.join(ALLOWED)}."
                )
            if self.optimizer not in ALLOWED:
                raise ValueError(
                    f"strategy.optimizer={self.optimizer}: not among those tested. "
                    f"{nearest(self.optimizer, ALLOWED)}"
                )

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._projection = Projection(space, self._history)
        self._optimizer: Any = None
        self._waiting: dict[str, Any] = {}
        self._losses: dict[str, float] = {}

    def ask(self) -> dict[str, Value] | None:
        """Return the optimizer's next untried proposal, ``None`` when all were tried."""
        optimizer = self._started()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of its own discrete handling
            for repeat in range(_REPEATS + 1):
                candidate = optimizer.ask()
                if repeat < _REPEATS:
                    point = self._projection.nearest_feasible(candidate.value)
                else:
                    point = self._projection.nearest_untried(candidate.value)
                if point is None:
                    break
                loss = self._losses.get(key_of(point))
                if not self._history.taken(point):
                    self._waiting[key_of(point)] = candidate
                    return self._history.propose(point)
                optimizer.tell(candidate, self._history.penalty() if loss is None else loss)
        self.stop_reason = self._history.why_none()
        return None

    def tell(self, trial: Trial) -> None:
        """Pass the result on to the optimizer."""
        self._history.tell(trial)
        key = self._history.key(trial.configuration)
        if key is None:
            return
        loss = self._history.log_loss(trial)
        if loss is None:
            self._waiting.pop(key, None)
            return
        self._losses[key] = loss
        optimizer = self._started()
        candidate = self._waiting.pop(key, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if candidate is None:
                values = self.space.canonical(trial.configuration)
                self._tell_unasked(optimizer, values, loss)
            else:
                optimizer.tell(candidate, loss)

    def describe(self) -> str:
        """One line for people."""
        return f"nevergrad's {self.options.optimizer}, {len(self._losses)} trials told"

    def _tell_unasked(self, optimizer: Any, values: dict[str, Value], loss: float) -> None:
        from nevergrad.common.errors import TellNotAskedNotSupportedError

        try:
            candidate = optimizer.parametrization.spawn_child(new_value=values)
            optimizer.tell(candidate, loss)
        except TellNotAskedNotSupportedError:
            # Such an optimizer starts from the configuration instead of learning its cost.
            optimizer.suggest(values)

    def _started(self) -> Any:
        if self._optimizer is None:
            import nevergrad

            parameters = {k.name: _parameter(nevergrad, k) for k in self.space.knobs}
            space = nevergrad.p.Dict(**parameters)
            space.random_state.seed(self.seed % 2**32)
            self._optimizer = nevergrad.optimizers.registry[self.options.optimizer](
                parametrization=space, budget=self.options.planned_trials, num_workers=1
            )
        return self._optimizer


_LISTED = 256
"""Values up to which a range is given as a list of choices."""


def _parameter(nevergrad: Any, knob: Knob) -> Any:
    if knob.count is not None and knob.count <= _LISTED:
        choices = list(knob.choices() or ())
        if knob.is_ordered and len(choices) > 2:
            return nevergrad.p.TransitionChoice(choices)
        return nevergrad.p.Choice(choices)
    assert knob.low is not None and knob.high is not None
    if knob.log:
        parameter = nevergrad.p.Log(lower=knob.low, upper=knob.high)
    else:
        parameter = nevergrad.p.Scalar(lower=knob.low, upper=knob.high)
    return parameter.set_integer_casting() if knob.kind == "integer" else parameter
