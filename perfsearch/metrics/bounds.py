"""Upper bounds of what can be gained, by part of a step, from a profile of the baseline.

A part's bound is what the step would take less if the part took nothing (computing: if the devices
reached their peak). Where the ranks ran steps without a part, the difference is taken, as a part
may also slow down others that it overlaps with; two standard errors are added. On a GPU a part may
also keep the host, and the device then idles in another phase: what the device idles is added to
the bound of each part that no steps were run without.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perfsearch.core.knob import Configuration, Knob, Part
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.knobs.fsdp import STAGE
from perfsearch.metrics.diagnosis import PASSES, saved_ms

_PHASES_OF_PARTS = (
    "dataloader_next", "to_device", "forward", "backward", "comm_exposed", "rank_wait", "optimizer",
)  # fmt: skip
"""Phases that belong to a part other than ``rest``."""

NO_HEADROOM = 0.01
"""A relative gain that a knob is not tried for before others, if it can give no more."""

LOADING_ALONE = "loading_alone"
"""In the evidence of a window whose timings bound what loading can give, and nothing else."""

_NAMED = 3
"""Names of knobs that are listed before the rest is only counted."""


@dataclass(frozen=True)
class UpperBound:
    """The most that knobs of one part can gain.

    Attributes:
        part: of the step.
        share: of the step that would go, from 0 to 1; 1 where the timings do not bound it.
        evidence: what it rests on, in numbers.
        idle: what of ``share`` is the device's idling, which several parts have in common.
        error: what of ``share`` was added for the timings' error: two standard errors.

    """

    part: Part
    share: float
    evidence: str
    idle: float = 0.0
    error: float = 0.0

    @property
    def says_something(self) -> bool:
        """Whether it is larger than its own error, and bounds the gain at all."""
        return self.share < 1 and self.share - self.error > self.error

    @property
    def gain(self) -> float:
        """The same as a relative gain in throughput."""
        return gain_of(self.share)


def gain_of(share: float) -> float:
    """Relative gain in throughput where ``share`` of the step goes; infinite for all of it."""
    return math.inf if share >= 1 else share / (1 - share)


def gain_text(gain: float) -> str:
    """A relative gain for people."""
    if math.isinf(gain):
        return "without a bound"
    return f"{gain:+.1%}" if gain < 1 else f"{gain:+.0%}"


def affected_parts(knob: Knob) -> tuple[Part, ...]:
    """Parts of a step that a knob can make shorter: all, where it does not say."""
    return knob.shortens or tuple(Part)


def upper_bounds(measurement: Measurement) -> list[UpperBound]:
    """The bound of each part, largest first; empty without a profile of the steps.

    Loading stands alone where nothing else is bounded, as in a script on a GPU: what its host waits
    for batches is known, and not what the device does meanwhile.
    """
    if "with_everything_ms" not in measurement.bottleneck_evidence:
        return []
    if LOADING_ALONE in measurement.bottleneck_evidence:
        return [_loading(measurement)]
    found = [_loading(measurement), _communication(measurement), _optimizer(measurement)]
    found.append(_computing(measurement))
    found.append(_rest(measurement))
    return sorted(found, key=lambda bound: -bound.share)


def knobs_by_part(knobs: Iterable[Knob]) -> dict[Part, list[str]]:
    """Names of the knobs that have a choice, by the part of the step that they touch."""
    names: dict[Part, list[str]] = {part: [] for part in Part}
    for knob in knobs:
        if knob.count != 1:
            for part in affected_parts(knob):
                names[part].append(knob.name)
    return names


def headroom_of(found: Sequence[UpperBound], knobs: Iterable[Knob]) -> float | None:
    """The most that a search over ``knobs`` can gain, relative; ``None`` where it is not known."""
    if not found:
        return None
    names = knobs_by_part(knobs)
    parts = {bound.part for bound in found}
    if any(listed for part, listed in names.items() if part not in parts):
        return math.inf
    moved = [bound for bound in found if names[bound.part]]
    idle = max((bound.idle for bound in moved), default=0.0)
    return gain_of(min(1.0, sum(bound.share - bound.idle for bound in moved) + idle))


def in_short(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMED
    listed = ", ".join(names[:_NAMED])
    return f"{listed} and {more} more" if more > 0 else listed


def profiled_measurement(
    trials: Sequence[Trial], configuration: Configuration
) -> Measurement | None:
    """The measurement with a profile of its steps among a configuration's trials.

    That of trial 0 comes first, by which the search was told what there is to gain, so that one
    configuration is never diagnosed twice. Of others it is the one whose scored steps are nearest
    the median of the trials that confirmed the configuration, as the verdict rests on these; else
    the first. Without a profile the same of all that ended well. A sentinel is none, which is there
    to see drift, nor what ran beside another trial.
    """
    key = key_of(configuration)
    found = [
        (trial.purpose, trial.measurement)
        for trial in trials
        if trial.measurement is not None
        and trial.measurement.step_seconds
        and trial.status is Status.OK
        and trial.purpose not in (Purpose.SENTINEL, Purpose.BESIDE)
        and key_of(trial.configuration) == key
    ]
    profiled = [m for _, m in found if "detailed_step_ms" in m.bottleneck_evidence]
    first = [m for purpose, m in found if purpose is Purpose.BASELINE]
    if first and any(m is first[0] for m in profiled):
        return first[0]
    candidates = profiled or [m for _, m in found]
    confirmed_s = [m.step_time_s for purpose, m in found if purpose is Purpose.CONFIRM]
    if not candidates or not confirmed_s:
        return next(iter(candidates), None)
    middle_s = statistics.median(confirmed_s)
    return min(candidates, key=lambda m: abs(m.step_time_s - middle_s))


def _share(ms: float, step_ms: float) -> float:
    return min(1.0, max(0.0, ms / step_ms))


def profiled_step_ms(measurement: Measurement) -> float:
    """A step of the profile's window in which phases were told apart; else one that was scored."""
    evidence = measurement.bottleneck_evidence
    known = (evidence.get(name) for name in ("detailed_step_ms", "with_everything_ms"))
    return next((ms for ms in known if ms), measurement.step_time_s * 1e3)


def _phase(measurement: Measurement, *names: str) -> tuple[float, float]:
    """Milliseconds of phases on the rank where they are longest, and their standard error."""
    evidence = measurement.bottleneck_evidence
    ranks = [r["phases_ms"] for r in measurement.environment.get("ranks", []) if "phases_ms" in r]
    ms = max(sum(r.get(name, 0.0) for name in names) for r in [measurement.phases_ms, *ranks])
    return ms, math.hypot(*(evidence.get(f"{name}_error_ms", 0.0) for name in names))


def _saved(measurement: Measurement, part: str) -> tuple[float, float, str] | None:
    """Share of a step that went without the part, two standard errors added, what of it these are,
    and words for it.
    """
    found = saved_ms(measurement.bottleneck_evidence, part)
    if found is None:
        return None
    saved, error = found
    step_ms = measurement.bottleneck_evidence["with_everything_ms"]
    less = f"{saved:.2f} ms less of {step_ms:.2f}" if saved > 0 else "no less"
    words = f"without it a step takes {less} (within {error:.2f} ms)"
    return _share(saved + error, step_ms), error / step_ms, words


def _idle_ms(measurement: Measurement) -> float:
    """What the idlest device idles in a step, while its host launches; 0 where none was watched."""
    step_ms = profiled_step_ms(measurement)
    evidence = measurement.bottleneck_evidence
    busy_ms = evidence.get("device_busy_least_ms", evidence.get("device_busy_ms", step_ms))
    return max(0.0, step_ms - busy_ms)


def _bound(
    measurement: Measurement, part: Part, ms: float, error_ms: float, words: str, hidden: bool
) -> UpperBound:
    """A bound from milliseconds of a step and two standard errors of theirs, with what the device
    idles where it may be ``hidden``: the part may keep the host longer than its phase on the device
    says.
    """
    step_ms = profiled_step_ms(measurement)
    ms, error = ms + 2 * error_ms, 2 * error_ms / step_ms
    share = _share(ms, step_ms)
    idle_ms = _idle_ms(measurement) if hidden else 0.0
    if idle_ms <= 0:
        return UpperBound(part, share, words, error=error)
    words += f", and the device idles {idle_ms:.2f} ms, in which it may keep the host"
    whole = _share(ms + idle_ms, step_ms)
    return UpperBound(part, whole, words, whole - share, error)


def _loading(measurement: Measurement) -> UpperBound:
    ms, error_ms = _phase(measurement, "dataloader_next", "to_device")
    if LOADING_ALONE in measurement.bottleneck_evidence:
        ms = max(ms, measurement.bottleneck_evidence.get("loading_host_ms", 0.0))
    words = f"waiting for batches and copying them takes {_of(measurement, ms)}"
    return _with_saved(measurement, Part.LOADING, ms, error_ms, words)


def _communication(measurement: Measurement) -> UpperBound:
    saved = _saved(measurement, Part.COMMUNICATION)
    exposed_ms = measurement.phases_ms.get("comm_exposed")
    if saved is None and exposed_ms is None:
        if measurement.world_size == 1 and STAGE.name not in measurement.in_force:
            # Sharding copies even where nobody is there to share with.
            return UpperBound(
                Part.COMMUNICATION, 0.0, "one rank alone has nobody to exchange anything with"
            )
        return UpperBound(Part.COMMUNICATION, 1.0, "its waiting cannot be told from computing here")
    _, error_ms = _phase(measurement, "comm_exposed")
    ms = exposed_ms or 0.0
    words = f"{_of(measurement, ms)} wait for it"
    return _with_saved(measurement, Part.COMMUNICATION, ms, error_ms, words)


def _with_saved(
    measurement: Measurement, part: Part, ms: float, error_ms: float, words: str
) -> UpperBound:
    """A bound from a phase, and from steps without the part where there were any."""
    saved = _saved(measurement, part)
    bound = _bound(measurement, part, ms, error_ms, words, hidden=saved is None)
    if saved is None:
        return bound
    share, error = max((bound.share, bound.error), saved[:2])
    return UpperBound(part, share, f"{words}, and {saved[2]}", error=error)


def _optimizer(measurement: Measurement) -> UpperBound:
    ms, error_ms = _phase(measurement, "optimizer")
    words = f"it takes {_of(measurement, ms)}"
    return _bound(measurement, Part.OPTIMIZER, ms, error_ms, words, hidden=True)


def _computing(measurement: Measurement) -> UpperBound:
    """What the passes take, and what ranks wait for one another, since they differ in that, too."""
    ms, error_ms = _phase(measurement, *PASSES)
    words = f"forward and backward take {_of(measurement, ms)}"
    wait_ms = measurement.phases_ms.get("rank_wait", 0.0)
    most_ms = _passes_and_waits_ms(measurement)
    peak = measurement.environment.get("peak_flops_per_s")
    if peak and measurement.flops_per_step:
        ideal_ms = measurement.flops_per_step / measurement.world_size / peak * 1e3
        precision = measurement.environment.get("precision", "")
        words += f", {ideal_ms:.2f} ms at the devices' peak in {precision}"
        most_ms -= ideal_ms
    if wait_ms > 0:
        words += f", and ranks wait {wait_ms:.2f} ms for one another"
    most_ms = max(-2 * error_ms, most_ms)  # of peaks that are surpassed, nothing is left
    return _bound(measurement, Part.COMPUTING, most_ms, error_ms, words, hidden=True)


def _passes_and_waits_ms(measurement: Measurement) -> float:
    """Milliseconds of the passes and of waiting for other ranks, where they are longest together.

    A rank with long passes is waited for, and so waits less itself.
    """
    phases = measurement.phases_ms
    most_ms = sum(phases.get(name, 0.0) for name in (*PASSES, "rank_wait"))
    for rank in measurement.environment.get("ranks", []):
        own: Mapping[str, float] = rank.get("phases_ms", {})
        waits_ms = 0.0
        if "rank_wait" in phases:
            waits_ms = max(0.0, own.get("comm_exposed", 0.0) - phases.get("comm_exposed", 0.0))
        most_ms = max(most_ms, sum(own.get(name, 0.0) for name in PASSES) + waits_ms)
    return most_ms


def _rest(measurement: Measurement) -> UpperBound:
    phases: Mapping[str, float] = measurement.phases_ms
    step_ms = profiled_step_ms(measurement)
    ms = max(0.0, step_ms - sum(phases.get(name, 0.0) for name in _PHASES_OF_PARTS))
    named = [name for name in phases if name not in _PHASES_OF_PARTS]
    words = "no phase covers" if not named else f"{', '.join(named)} and what no phase covers take"
    return UpperBound(Part.REST, _share(ms, step_ms), f"{words} {_of(measurement, ms)}")


def _of(measurement: Measurement, ms: float) -> str:
    return f"{ms:.2f} ms of a {profiled_step_ms(measurement):.2f} ms step"
