"""Markov chain Monte Carlo over configurations, as FlexFlow searches parallelisations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfsearch.core.hints import PROPAGATION, Acceptance, ChainRequest, Hints
from perfsearch.core.knob import Value, same_value
from perfsearch.core.option import option
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Trial
from perfsearch.strategies._history import History
from perfsearch.strategies.base import Strategy

_LONGEST_CARRY = 8
"""Knobs that one proposal changes at most."""

_CARRY_ON = 0.75
"""Chance that a value which was carried over is carried on."""

_FREE_STEPS = 500
"""Steps through known states in one ask, after which the chain moves to an untried one."""


@dataclass
class _State:
    """Where one chain stands."""

    configuration: dict[str, Value]
    cost: float
    steps: int = 0


class Mcmc(Strategy):
    """Changes one knob at a time and accepts a worse configuration with ``exp(-alpha * d)``.

    ``d`` is the difference in percent of the start's cost (FlexFlow's is in milliseconds, and so
    depends on the size of the model). States that are visited again are served from the history.
    Failures are never accepted. Where the runner predicts costs, ``proposals`` steps are taken on
    the predictions, and the best states found are measured, best first; a runner with a simulator
    of its own runs the chain itself. Where the runner says which knobs are neighbours (the
    operators of a graph), ``propagation`` of the proposals carry a knob's value on to neighbours
    that can have it, as FlexFlow does with an operator's configuration.

    After Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks, 2019.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=mcmc``.

        Attributes:
            alpha: how strictly worse states are refused, per percent of the start's cost, of the
                current one's where a runner runs the chain itself; 0 accepts all of them, a large
                number none; ``None``: 0.05, or as such a runner finds best.
            acceptance: what ``alpha`` is per: ``percent`` of the cost, the same for fast and slow
                models, or ``milliseconds``, as in the paper, for runners that run the chain.
            proposals: steps on predicted costs, all chains together; 0 measures the start alone;
                ``None``: 1,000, or as a runner that runs the chain itself finds best. Without
                predictions it has no effect: each step is then a trial.
            chains: number of chains that take turns; ``None``: 1, or as a runner that runs them
                itself finds best: that has each begin elsewhere.
            seconds: most seconds that a runner spends on chains that it runs itself; ``None``: no
                limit. With it, what is found depends on the machine's speed.
            return_every: steps after which a chain goes back to the best state; 0 never; ``None``:
                25, or as a runner that runs the chain itself finds best.
            propagation: share of proposals that carry a value over to neighbouring knobs, 0 for
                none; ``None``: 0.25. Without neighbours it has no effect.
            start: configuration to start from; ``None`` takes the runner's, or the baseline.

        """

        alpha: float | None = option(None, low=0)
        acceptance: Acceptance = "percent"
        proposals: int | None = option(None, low=0)
        chains: int | None = option(None, low=1)
        seconds: float | None = option(None, above=0)
        return_every: int | None = option(None, low=0)
        propagation: float | None = option(None, low=0, high=1)
        start: Mapping[str, Value] | None = None

    def __init__(self, space: Space, hints: Hints, seed: int, options: Any = None) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._generator = np.random.default_rng(seed % 2**63)
        self._states: list[_State] = []
        self._of_proposal: dict[str, int] = {}
        self._turn = 0
        self._costs: dict[str, float] = {}
        self._start_cost = 1.0
        self._ranked: list[dict[str, Value]] | None = None
        self._alpha = 0.05 if self.options.alpha is None else self.options.alpha
        every, steps = self.options.return_every, self.options.proposals
        self._return_every = 25 if every is None else every
        self._proposals = 1000 if steps is None else steps
        share = self.options.propagation
        self._chains = self.options.chains or 1
        self._propagation = PROPAGATION if share is None else share
        start = hints.start or hints.baseline
        if self.options.start is not None:
            start = dict(self.options.start)
        if self.options.acceptance != "percent" and hints.run_chain is None:
            raise ValueError(
                f"strategy.acceptance={self.options.acceptance}: only a runner that runs the chain "
                "on its own simulator (runner=soap) counts in milliseconds; use percent"
            )
        reasons = space.violations(start)
        if reasons and self.options.start is not None:
            raise ValueError(f"strategy.start={dict(start)}: {'; '.join(reasons)}")
        self._start = None if reasons else space.canonical(start)

    def ask(self) -> dict[str, Value] | None:
        """Return the next state to measure, ``None`` when every state was."""
        if self._start is not None and self.hints.predict(self._start).cost is not None:
            return self._ask_ranked(self._start)
        point: dict[str, Value] | None = None
        if not self._states and self._start is not None and not self._history.taken(self._start):
            return self._history.propose(self._start)
        chain = self._turn % self._chains
        self._turn += 1
        if chain < len(self._states):
            point = self._next_state(self._states[chain])
        if point is None:
            point = self._history.draw(self._generator)
        if point is None:
            self.stop_reason = self._history.why_none()
            return None
        self._of_proposal[key_of(point)] = chain
        return self._history.propose(point)

    def tell(self, trial: Trial) -> None:
        """Let the chain that proposed it accept or refuse it."""
        self._history.tell(trial)
        key = self._history.key(trial.configuration)
        if key is None or trial.cost is None or trial.status.is_failure:
            return
        point = self.space.canonical(trial.configuration)
        first = key not in self._costs
        self._costs.setdefault(key, trial.cost)
        if not self._states:
            self._start_cost = trial.cost
            self._states = [_State(point, trial.cost) for _ in range(self._chains)]
        elif first and key in self._of_proposal:
            self._consider(self._states[self._of_proposal.pop(key)], point, trial.cost)

    def describe(self) -> str:
        """One line for people."""
        states = ", ".join(f"{100 * c.cost / self._start_cost:.1f}%" for c in self._states)
        return f"Markov chain, alpha {self._alpha:g}; at {states or 'the start'} of its cost"

    def _next_state(self, chain: _State) -> dict[str, Value] | None:
        for _ in range(_FREE_STEPS):
            point = self._neighbour(chain.configuration, self._generator)
            if point is None:
                return None
            cost = self._costs.get(key_of(point))
            if not self._history.taken(point):
                return point
            if cost is not None:
                self._consider(chain, point, cost)
        return None

    def _neighbour(
        self, configuration: dict[str, Value], generator: np.random.Generator
    ) -> dict[str, Value] | None:
        """A feasible configuration with one knob changed, uniform over the knob's other values, or
        with one knob's value carried over to others.
        """
        carries = bool(self.hints.neighbours) and self._propagation > 0
        for _ in range(50):
            if carries and generator.random() < self._propagation:
                point = self._carried(configuration, generator)
                if key_of(point) != key_of(configuration) and self.space.feasible(point):
                    return point
                continue
            knob = self.space.knobs[int(generator.integers(len(self.space.knobs)))]
            if knob.count is not None and knob.count <= 4096:
                others = [
                    v for v in knob.choices() or () if not same_value(v, configuration[knob.name])
                ]
                if not others:
                    continue
                value = others[int(generator.integers(len(others)))]
            else:
                value = knob.from_unit(float(generator.random()))
            point = self.space.canonical({**configuration, knob.name: value})
            if key_of(point) != key_of(configuration) and self.space.feasible(point):
                return point
        return None

    def _carried(
        self, configuration: dict[str, Value], generator: np.random.Generator
    ) -> dict[str, Value]:
        """Follow neighbours, each given the value of the one before where it can have it."""
        values = dict(configuration)
        name = self.space.knobs[int(generator.integers(len(self.space.knobs)))].name
        for _ in range(_LONGEST_CARRY - 1):
            beside = [n for n in self.hints.neighbours.get(name, ()) if n in values]
            if not beside:
                break
            other = beside[int(generator.integers(len(beside)))]
            if not self.space.by_name[other].contains(values[name]):
                break
            values[other] = values[name]
            name = other
            if generator.random() >= _CARRY_ON:
                break
        return self.space.canonical(values)

    def _accepts(
        self, cost: float, current: float, start: float, generator: np.random.Generator
    ) -> bool:
        worse_percent = 100.0 * (cost - current) / start
        if worse_percent <= 0:
            return True
        return bool(generator.random() < math.exp(-self._alpha * worse_percent))

    def _returns(self, chain: _State) -> bool:
        """Count a step; whether it is time to go back to the best state."""
        chain.steps += 1
        return bool(self._return_every and chain.steps % self._return_every == 0)

    def _consider(self, chain: _State, point: dict[str, Value], cost: float) -> None:
        if self._accepts(cost, chain.cost, self._start_cost, self._generator):
            chain.configuration, chain.cost = dict(point), cost
        best = self._history.best()
        if self._returns(chain) and best is not None and best.cost is not None:
            chain.configuration = self.space.canonical(best.configuration)
            chain.cost = best.cost

    def _ask_ranked(self, start: dict[str, Value]) -> dict[str, Value] | None:
        if self._ranked is None:
            by_runner = self.hints.run_chain is not None
            self._ranked = self._run_by_runner(start) if by_runner else self._simulate(start)
        for point in self._ranked:
            if not self._history.taken(point):
                return self._history.propose(point)
        size = self.space.size
        self.stop_reason = (
            self._history.why_none()
            if size is not None and len(self._ranked) >= size
            else "every state that the chain kept was measured"
            if self.hints.run_chain
            else f"every state found in {self._proposals} proposals was measured"
        )
        return None

    def _run_by_runner(self, start: dict[str, Value]) -> list[dict[str, Value]]:
        """Let the runner run the chains."""
        assert self.hints.run_chain is not None
        chosen = self.options
        result = self.hints.run_chain(
            ChainRequest(
                start,
                chosen.proposals,
                self.seed % 2**63,
                chosen.alpha,
                chosen.return_every,
                chosen.propagation,
                chosen.chains,
                chosen.seconds,
                chosen.acceptance,
            )
        )
        self.chain_results.append(result)
        found: dict[str, dict[str, Value]] = {}
        for point in result.points:
            if self.space.feasible(point):
                found.setdefault(key_of(point), self.space.canonical(point))
        return list(found.values())

    def _simulate(self, start: dict[str, Value]) -> list[dict[str, Value]]:
        """Run the chains on predicted costs; return the states seen, best first."""
        cost = self.hints.predict(start).cost
        assert cost is not None
        generator = np.random.default_rng([self.seed % 2**63, 1])
        states = [_State(dict(start), cost) for _ in range(self._chains)]
        seen = {key_of(start): (cost, dict(start))}
        best = (cost, dict(start))
        for step in range(self._proposals):
            chain = states[step % len(states)]
            point = self._neighbour(chain.configuration, generator)
            if point is None:
                break
            predicted = self.hints.predict(point).cost
            if predicted is None:
                continue
            seen[key_of(point)] = (predicted, point)
            best = min(best, (predicted, point), key=lambda state: state[0])
            if self._accepts(predicted, chain.cost, cost, generator):
                chain.configuration, chain.cost = point, predicted
            if self._returns(chain):
                chain.cost, chain.configuration = best
        return [point for _, point in sorted(seen.values(), key=lambda state: state[0])]
