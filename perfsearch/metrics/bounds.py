"""What there is to gain, at most: from a close look at the baseline, for each part of its step.

A part's bound is what the step would take less if the part took nothing (computing: if the devices
reached their peak). Where the ranks ran steps without a part, the difference is taken, as a part
may also slow down others that it overlaps with; two standard errors are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perfsearch.metrics.findings import saved_ms
from perfsearch.search.knob import Knob
from perfsearch.search.trial import Measurement

COMMUNICATION = "communication"
LOADING = "loading"
OPTIMIZER = "optimizer"
COMPUTING = "computing"
REST = "rest"

PARTS = (LOADING, COMMUNICATION, OPTIMIZER, COMPUTING, REST)
"""Parts of a step that together are all of it; ``rest`` is what no phase covers."""

_EVERYTHING = PARTS
_SHARDING = (COMMUNICATION, OPTIMIZER, COMPUTING)

_TOUCHES: dict[str, tuple[str, ...]] = {
    "dataloader_workers": (LOADING,),
    "prefetch_factor": (LOADING,),
    "pin_memory": (LOADING,),
    "optimizer_implementation": (OPTIMIZER,),
    "compile_mode": (COMPUTING,),
    "channels_last": (COMPUTING,),
    "cudnn_benchmark": (COMPUTING,),
    "activation_checkpointing": (COMPUTING,),
    "mixed_precision": (COMPUTING, COMMUNICATION),
    "micro_batch": (COMPUTING, COMMUNICATION, LOADING),
    "zero_stage": _SHARDING,
    "cpu_offload": _SHARDING,
    **dict.fromkeys(
        (
            *("bucket_cap_mb", "first_bucket_mb", "gradient_as_bucket_view", "static_graph"),
            *("hierarchical_group_size", "shard_group_size", "reshard_group_size"),
            *("blocks_per_unit", "forward_prefetch", "backward_prefetch", "gradient_sync_each"),
            *("nccl_nsocks_perthread", "nccl_socket_nthreads", "nccl_algo", "nccl_proto"),
            *("nccl_min_ctas", "nccl_max_ctas", "nccl_buffsize"),
        ),
        (COMMUNICATION,),
    ),
}
"""Parts that a knob can make shorter. One that is not listed may do anything."""


@dataclass(frozen=True)
class Bound:
    """The most that knobs of one part can give.

    Attributes:
        part: of the step.
        share: of the step that would go, from 0 to 1; 1 where the timings do not bound it.
        evidence: what it rests on, in numbers.

    """

    part: str
    share: float
    evidence: str

    @property
    def gain(self) -> float:
        """The same as a relative gain in throughput."""
        return gain_of(self.share)


def gain_of(share: float) -> float:
    """Relative gain in throughput where ``share`` of the step goes; infinite for all of it."""
    return math.inf if share >= 1 else share / (1 - share)


def percent(gain: float) -> str:
    """A relative gain for people."""
    if math.isinf(gain):
        return "without a bound"
    return f"{gain:+.1%}" if gain < 1 else f"{1 + gain:.1f}x"


def touched(knob: str) -> tuple[str, ...]:
    """Parts of a step that a knob can make shorter."""
    return _TOUCHES.get(knob, _EVERYTHING)


def bounds(measurement: Measurement) -> list[Bound]:
    """The bound of each part, largest first; empty without a close look at the steps."""
    if "with_everything_ms" not in measurement.bottleneck_evidence:
        return []
    found = [_loading(measurement), _communication(measurement), _optimizer(measurement)]
    found.append(_computing(measurement))
    found.append(_rest(measurement))
    return sorted(found, key=lambda bound: -bound.share)


def searched(knobs: Iterable[Knob]) -> dict[str, list[str]]:
    """Names of the knobs that have a choice, by the part of the step that they touch."""
    names: dict[str, list[str]] = {part: [] for part in PARTS}
    for knob in knobs:
        if knob.count != 1:
            for part in touched(knob.name):
                names[part].append(knob.name)
    return names


def bound_of(found: Sequence[Bound], knobs: Iterable[Knob]) -> float | None:
    """The most that a search over ``knobs`` can gain, relative; ``None`` where it is not known."""
    if not found:
        return None
    names = searched(knobs)
    return gain_of(min(1.0, sum(bound.share for bound in found if names[bound.part])))


def _share(ms: float, step_ms: float) -> float:
    return min(1.0, max(0.0, ms / step_ms))


def _detailed_ms(measurement: Measurement) -> float:
    """The step in the window in which phases were told apart."""
    evidence = measurement.bottleneck_evidence
    return evidence.get("detailed_step_ms", evidence["with_everything_ms"])


def _phase(measurement: Measurement, *names: str) -> tuple[float, float]:
    """Milliseconds of phases on the rank where they are longest, and their standard error."""
    evidence = measurement.bottleneck_evidence
    ranks = [r["phases_ms"] for r in measurement.environment.get("ranks", []) if "phases_ms" in r]
    ms = max(sum(r.get(name, 0.0) for name in names) for r in [measurement.phases_ms, *ranks])
    return ms, math.hypot(*(evidence.get(f"{name}_error_ms", 0.0) for name in names))


def _saved(measurement: Measurement, part: str) -> tuple[float, str] | None:
    """Share of a step that went without the part, two standard errors added, and words for it."""
    found = saved_ms(measurement.bottleneck_evidence, part)
    if found is None:
        return None
    saved, error = found
    step_ms = measurement.bottleneck_evidence["with_everything_ms"]
    less = f"{saved:.2f} ms less of {step_ms:.2f}" if saved > 0 else "no less"
    words = f"without it a step takes {less} (within {error:.2f} ms)"
    return _share(saved + error, step_ms), words


def _loading(measurement: Measurement) -> Bound:
    ms, error_ms = _phase(measurement, "dataloader_next", "to_device")
    share = _share(ms + 2 * error_ms, _detailed_ms(measurement))
    words = f"waiting for batches and copying them takes {_of(measurement, ms)}"
    saved = _saved(measurement, LOADING)
    if saved is not None:
        share, words = max(share, saved[0]), f"{words}, and {saved[1]}"
    return Bound(LOADING, share, words)


def _communication(measurement: Measurement) -> Bound:
    saved = _saved(measurement, COMMUNICATION)
    exposed_ms = measurement.phases_ms.get("comm_exposed")
    if saved is None and exposed_ms is None:
        return Bound(COMMUNICATION, 1.0, "its waiting cannot be told from computing here")
    _, error_ms = _phase(measurement, "comm_exposed")
    ms = exposed_ms or 0.0
    share = _share(ms + 2 * error_ms, _detailed_ms(measurement))
    words = f"{_of(measurement, ms)} wait for it"
    if saved is not None:
        share, words = max(share, saved[0]), f"{words}, and {saved[1]}"
    return Bound(COMMUNICATION, share, words)


def _optimizer(measurement: Measurement) -> Bound:
    ms, error_ms = _phase(measurement, "optimizer")
    share = _share(ms + 2 * error_ms, _detailed_ms(measurement))
    return Bound(OPTIMIZER, share, f"it takes {_of(measurement, ms)}")


def _computing(measurement: Measurement) -> Bound:
    """What the passes take, and what ranks wait for one another, since they differ in that, too."""
    ms, error_ms = _phase(measurement, "forward", "backward")
    peak = measurement.environment.get("peak_flops_per_s")
    words = f"forward and backward take {_of(measurement, ms)}"
    most_ms = ms + 2 * error_ms + measurement.phases_ms.get("rank_wait", 0.0)
    if peak and measurement.flops_per_step:
        ideal_ms = measurement.flops_per_step / measurement.world_size / peak * 1e3
        precision = measurement.environment.get("precision", "")
        words += f", {ideal_ms:.2f} ms at the devices' peak in {precision}"
        most_ms -= ideal_ms
    return Bound(COMPUTING, _share(most_ms, _detailed_ms(measurement)), words)


def _rest(measurement: Measurement) -> Bound:
    phases: Mapping[str, float] = measurement.phases_ms
    step_ms = _detailed_ms(measurement)
    ms = max(0.0, step_ms - sum(phases.values()))
    return Bound(REST, _share(ms, step_ms), f"no phase covers {_of(measurement, ms)}")


def _of(measurement: Measurement, ms: float) -> str:
    return f"{ms:.2f} ms of a {_detailed_ms(measurement):.2f} ms step"
