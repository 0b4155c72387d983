"""Predicted memory of a configuration, corrected by every trial.

The arithmetic of ``memory_peak`` is the expectation. Measured peaks correct it through a Bayesian
linear regression with few, tightly bounded terms: what wrappers hold, what is gathered, and the
size of activations, each shared between the configurations that it concerns. So two
neighbouring trials cannot swing a prediction far away from them, and a trial of one stage teaches
something about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from perfsearch.metrics.memory_facts import GIB, Layout, MemoryFacts
from perfsearch.metrics.memory_peak import Peak, peak

MARGIN_DEVIATIONS = 2.0
"""The stated margin: so many standard deviations to either side."""

_UNKNOWN_SLOPE_GIB = 4.0
"""How uncertain the growth with each sample is where nothing is known of activations."""


@dataclass(frozen=True)
class Observation:
    """What a trial tells of memory.

    Attributes:
        layout: of its configuration.
        peak_gib: measured; ``None`` where it ran out of memory.

    """

    layout: Layout
    peak_gib: float | None


@dataclass(frozen=True)
class Estimate:
    """What is expected of a configuration, in GiB.

    Attributes:
        at_rest_gib: between steps, gradients included.
        peak_gib: the most during a step.
        low_gib: the peak is hardly less.
        high_gib: the peak is hardly more.

    """

    at_rest_gib: float
    peak_gib: float
    low_gib: float
    high_gib: float


class Terms:
    """The arithmetic of a job's configurations, each worked out once for any number of models.

    Args:
        facts: of the job.

    """

    def __init__(self, facts: MemoryFacts) -> None:
        self.facts = facts
        self._known: dict[Layout, tuple[Peak, np.ndarray, float]] = {}

    def of(self, layout: Layout) -> tuple[Peak, np.ndarray, float]:
        """The expected peak, the terms that correct it, and a reading's own deviation in GiB.

        Terms are in units of their prior standard deviation.
        """
        if layout not in self._known:
            found = peak(self.facts, layout)
            self._known[layout] = found, self._terms(layout, found), self._noise(layout, found)
        return self._known[layout]

    def _terms(self, layout: Layout, found: Peak) -> np.ndarray:
        gradients = self.facts.trainable_bytes / GIB
        wrapped = 0.0 if layout.sharded else 0.5 * gradients
        gathered = 0.3 * found.gathered / GIB
        if found.activations is None:
            growth = _UNKNOWN_SLOPE_GIB * layout.micro_batch
            checkpointed = growth if layout.checkpoint_every else 0.0
            return np.array([0.3, wrapped, gathered, growth, 0.0, checkpointed])
        growth = found.activations / GIB if found.activations_decide else 0.0
        return np.array(
            [
                0.2 + 0.02 * self.facts.parameter_bytes / GIB,
                wrapped,
                gathered,
                0.08 * growth,
                0.0 if layout.sharded else 0.05 * growth,
                0.10 * growth if layout.checkpoint_every else 0.0,
            ]
        )

    def _noise(self, layout: Layout, found: Peak) -> float:
        wrapped = 0.0 if layout.sharded else 0.25 * self.facts.trainable_bytes / GIB
        blind = 0.1 * _UNKNOWN_SLOPE_GIB * layout.micro_batch if found.activations is None else 0.0
        return 0.1 + 0.02 * found.total / GIB + wrapped + blind


class MemoryModel:
    """Expected peaks after some observations; it does not change.

    Args:
        terms: the arithmetic of the job.
        observations: of trials so far.
        capacity_gib: what a device holds; a trial that ran out of memory is taken to have needed
            somewhat more.

    """

    def __init__(
        self,
        terms: Terms,
        observations: Sequence[Observation] = (),
        capacity_gib: float | None = None,
    ) -> None:
        self._terms = terms
        self.capacity_gib = capacity_gib
        self._failed = [o.layout for o in observations if o.peak_gib is None]
        rows = [(o.layout, o.peak_gib) for o in observations if o.peak_gib is not None]
        self._mean, self._covariance = self._fit(rows)
        beyond = [
            (layout, 1.02 * capacity_gib)
            for layout in self._failed
            if capacity_gib is not None and self.predict(layout).peak_gib < capacity_gib
        ]
        if beyond:
            self._mean, self._covariance = self._fit([*rows, *beyond])

    def predict(self, layout: Layout) -> Estimate:
        """What to expect of a configuration."""
        found, terms, noise = self._terms.of(layout)
        mean = found.total / GIB + float(terms @ self._mean)
        variance = float(terms @ self._covariance @ terms) + noise**2
        margin = MARGIN_DEVIATIONS * variance**0.5
        floor = (found.rest.total - found.rest.gradients) / GIB
        mean = max(mean, floor)
        return Estimate(found.rest.total / GIB, mean, max(floor, mean - margin), mean + margin)

    def dominated(self, layout: Layout) -> Layout | None:
        """A configuration that ran out of memory and differs in having no larger micro-batch."""
        for failed in self._failed:
            if failed.micro_batch <= layout.micro_batch and _alike(failed, layout):
                return failed
        return None

    def surely_too_large(self, layout: Layout) -> str:
        """Why a configuration cannot fit, in words; empty where it may."""
        failed = self.dominated(layout)
        if failed is not None:
            return f"micro_batch={failed.micro_batch} ran out of memory with the same other values"
        if self.capacity_gib is None:
            return ""
        estimate = self.predict(layout)
        if estimate.low_gib > self.capacity_gib:
            return (
                f"needs about {estimate.peak_gib:.1f} GiB (surely {estimate.low_gib:.1f}), "
                f"{self.capacity_gib:.1f} GiB are there"
            )
        return ""

    def _fit(self, rows: Sequence[tuple[Layout, float]]) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and covariance of the corrections, whose prior is a unit Gaussian."""
        size = 6
        precision, weighted = np.eye(size), np.zeros(size)
        for layout, measured in rows:
            found, terms, noise = self._terms.of(layout)
            residual = measured - found.total / GIB
            precision += np.outer(terms, terms) / noise**2
            weighted += terms * residual / noise**2
        covariance = np.linalg.inv(precision)
        return covariance @ weighted, covariance


def _alike(one: Layout, other: Layout) -> bool:
    """Whether they differ in micro-batch and accumulation only, one accumulating where both do."""
    same: Callable[[str], bool] = lambda name: getattr(one, name) == getattr(other, name)  # noqa: E731
    names = [n for n in Layout.__dataclass_fields__ if n not in ("micro_batch", "accumulation")]
    return all(same(n) for n in names) and (one.accumulation < 2 or other.accumulation >= 2)
