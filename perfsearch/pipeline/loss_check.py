"""Loss check: whether two configurations train the same model the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsearch.core.knob import Configuration, Knob, Numerics, Part, same_value
from perfsearch.core.losses import largest_difference
from perfsearch.core.trial import DRAWS_IN_FORWARD, PERTURBED, Status, Trial
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH

_SAFETY = 3.0
"""Two starts show less of what starts can differ by than many would."""

_LEAST_REDRAWN = 0.05
"""What other random numbers in the forward pass may change in a loss in any case."""

_MOST = 0.45
"""Share of a loss beyond which no allowance goes: half the loss, or twice, is another loss. Unless
the baseline's own starts are further apart.
"""


@dataclass(frozen=True, order=True)
class Allowance:
    """What first losses may differ by from the baseline's beyond ``limits.loss_tolerance``.

    Attributes:
        share: of the loss.
        kind: which allowance it is.
        why: one line for people.

    """

    share: float = 0.0
    kind: str = ""
    why: str = ""


def between_starts(today: Sequence[Trial]) -> Allowance:
    """What the baseline's own starts differ by.

    Args:
        today: trials of the baseline's configuration, trial 0 first.

    """
    apart, share = _apart([t for t in today if not is_perturbed(t)])
    return Allowance(
        share,
        "starts",
        f"the baseline's own losses differ by up to {_percent(apart)} between two starts, though "
        f"nothing was changed: other configurations are held to {_percent(share)}",
    )


def _apart(today: Sequence[Trial]) -> tuple[float, float]:
    """How far losses are from those of the first of these trials, and what that allows."""
    seen = [t.measurement.first_losses for t in today if t.status is Status.OK and t.measurement]
    apart = max((largest_difference(seen[0], again) for again in seen[1:]), default=0.0)
    return apart, max(min(_SAFETY * apart, _MOST), _SAFETY / 2 * apart)


def is_perturbed(trial: Trial) -> bool:
    """Whether weights were changed after its first step, by as much as rounding does."""
    return trial.measurement is not None and bool(trial.measurement.environment.get(PERTURBED))


def has_other_kernels(
    reference: Trial, configuration: Configuration, knobs: Sequence[Knob]
) -> bool:
    """Whether the model is computed by other kernels than the reference's, which round otherwise.

    In weights that were just drawn that can grow a hundredfold within a few steps, and the first
    losses of a sound configuration be apart by some percent: a ResNet-50 in float32 on a GPU.
    """
    return any(
        knob.numerics is Numerics.REORDERED
        and Part.COMPUTING in knob.shortens
        and not same_value(configuration[knob.name], reference.configuration[knob.name])
        for knob in knobs
    )


def of_rounding(today: Sequence[Trial]) -> Allowance:
    """What other rounding may change, as the baseline's own start with perturbed weights shows.

    Args:
        today: trials of the baseline's configuration, trial 0 first.

    """
    apart, share = _apart([t for n, t in enumerate(today) if n == 0 or is_perturbed(t)])
    return Allowance(
        share,
        "rounding",
        "where weights are changed by as little as other kernels round, the baseline's own losses "
        f"differ by up to {_percent(apart)}: such configurations are held to {_percent(share)}",
    )


def other_draws(reference: Trial, configuration: Configuration, knobs: Sequence[Knob]) -> Allowance:
    """What is allowed where the forward pass draws by nature other numbers than the reference's.

    Nobody can tell what other masks of a dropout change. The steps of the reference itself have
    other masks and other samples, so that their losses differ by as much at least.
    """
    measured = reference.measurement
    changed = [
        knob.name
        for knob in knobs
        if knob.redraws
        and not same_value(configuration[knob.name], reference.configuration[knob.name])
    ]
    if not changed or measured is None or not measured.environment.get(DRAWS_IN_FORWARD):
        return Allowance()
    losses = measured.first_losses
    spread = (max(losses) - min(losses)) / max(map(abs, losses)) if any(losses) else 0.0
    share = min(max(_LEAST_REDRAWN, spread), _MOST)
    return Allowance(
        share,
        "draws",
        f"the forward pass draws random numbers (dropout, say), and others with another "
        f"{' or '.join(changed)}: such configurations are held to {_percent(share)} of the loss, "
        "as the baseline's own losses differ from step to step",
    )


_ACCUMULATED_ALIKE = 0.05
"""What the ratio of losses may be off by, relative, from that of the micro-batches of a step."""


def adds_up(
    reference: Trial, configuration: Configuration, expected: Sequence[float], seen: Sequence[float]
) -> str:
    """Why losses differ as the number of micro-batches of a step does; empty where they do not.

    The loss of a step is the sum over its backward passes. Of a script that averages, it is the
    same however many there are; of one that only adds up gradients it grows with their number.

    Args:
        reference: trial that is compared with.
        configuration: of the trial.
        expected: first losses of the reference.
        seen: first losses of the trial.

    """
    more = _micro_batches(configuration) / _micro_batches(reference.configuration)
    if not (expected and seen and expected[0]) or math.isclose(more, 1.0):
        return ""
    if not math.isclose(seen[0] / expected[0], more, rel_tol=_ACCUMULATED_ALIKE):
        return ""
    return (
        f"{seen[0] / expected[0]:.3g} times the loss with {more:.3g} times the micro-batches: the "
        "script adds gradients up without averaging them"
    )


AVERAGE_THEM = (
    "the script adds up the gradients of a step's micro-batches without averaging them, so that "
    "another number of them trains otherwise. Have it divide each loss by their number before "
    f"backward(), or leave {ACCUMULATION.name} and {MICRO_BATCH.name} out of the search"
)
"""What to do about it."""


def _micro_batches(configuration: Configuration) -> float:
    """How many micro-batches a step has, up to a factor that all configurations share."""
    accumulated, micro = ACCUMULATION.of(configuration), MICRO_BATCH.of(configuration)
    if accumulated is not None:
        return float(accumulated)
    return 1.0 / float(micro) if micro else 1.0


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 1 else f"{100 * share:.0f}%"
