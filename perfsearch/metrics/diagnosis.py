"""What holds a job back: an ordered set of rules over one measurement.

The order and most thresholds follow the rule sets of PyTorch's Kineto plugin, TensorFlow's input
pipeline analyzer and SageMaker Debugger. NVML's utilisation alone never decides: a collective that
spins, or a single busy multiprocessor, shows as 100 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.core.trial import WITHOUT_LOADER, Measurement
from perfsearch.core.units import GIB, MEGA
from perfsearch.metrics.slow_steps import SLOW_STEPS, THROTTLED, Cause, slow_steps, told
from perfsearch.metrics.thresholds import Thresholds
from perfsearch.metrics.throughput import mfu_of


def diagnose(measurement: Measurement, limits: Thresholds | None = None) -> list[Finding]:
    """Everything that the rules find, the bottleneck first; never empty.

    Args:
        measurement: with phases; without any, only memory and utilisation can be judged.
        limits: when rules fire.

    Raises:
        ValueError: the measurement has no step times.

    """
    if not measurement.step_seconds:
        raise ValueError("a measurement without step times cannot be diagnosed")
    evidence = measurement.bottleneck_evidence
    # what phases sum to is a mean over the ranks; the scored steps are the slowest rank's
    step_ms = evidence.get("detailed_step_ms") or evidence.get("phases_step_ms")
    step_ms = step_ms or statistics.fmean(measurement.step_seconds) * 1e3
    facts = Facts(measurement, limits or Thresholds(), step_ms, dict(evidence))
    found = [finding for rule in _RULES if (finding := rule(facts)) is not None]
    order = list(Severity)
    found.sort(key=lambda f: order.index(f.severity))
    found = found or [_compute(facts) or _nothing_stands_out(facts)]
    beside = uneven_steps(facts)
    found += [] if beside is None else [beside]
    return [replace(finding, in_force=measurement.in_force) for finding in found]


def report(findings: list[Finding]) -> str:
    """Findings as lines for a terminal or a note."""
    return "\n".join(f"- {finding}" for finding in findings)


# -----------------------------------------------------------------------------
# What a diagnosis is made of: findings, from facts of a measurement and thresholds.


class Severity(StrEnum):
    """How much a finding costs."""

    HIGH = "high"
    MODERATE = "moderate"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One thing that holds the job back.

    Attributes:
        name: short and stable, for tags.
        severity: how much it costs.
        evidence: what was measured, in numbers.
        share: part of the step that it takes, from 0 to 1, where it is a part.
        causes: what of it was seen, as ``metrics.advice`` knows them.
        in_force: knobs as they were read back, so that nothing is advised that is so already.

    """

    name: str
    severity: Severity
    evidence: str
    share: float | None = None
    causes: tuple[str, ...] = ()
    in_force: Mapping[str, Value] = field(default_factory=dict, compare=False, repr=False)

    @property
    def advice(self) -> str:
        """What to do."""
        # which imports this module
        from perfsearch.metrics.advice import sentences

        return sentences(self.name, self.causes, self.in_force)

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}): {self.evidence}. {self.advice}".rstrip()


DISK, NETWORK, PROCESSORS = "disk", "network", "processors"
OTHER_JOBS, UNKNOWN = "other jobs", "unknown"
"""What loading waits for, as a cause of its finding."""

DEVICE, DATA, LOADERS = "device", "data", "loaders"
"""Where the cause of a slow rank is to be looked for."""

UNPROFILED = "unprofiled"
"""Why nothing may be in sight."""

PASSES = ("forward", "backward")
"""Phases in which a rank computes."""


@dataclass(frozen=True)
class Facts:
    """A measurement as the rules read it."""

    measurement: Measurement
    limits: Thresholds
    step_ms: float
    evidence: Mapping[str, float] = field(default_factory=dict)

    def phase_ms(self, name: str) -> float:
        """Milliseconds a step of a phase; 0 where it was not seen."""
        return self.measurement.phases_ms.get(name, 0.0)

    def share(self, *phases: str) -> float:
        """Part of the step that phases take together."""
        return sum(self.phase_ms(p) for p in phases) / self.step_ms

    def system(self, name: str) -> float | None:
        """A system metric of the whole cluster."""
        return self.measurement.system.get(name)

    def above(self, name: str, limit: float) -> bool:
        """Whether a system metric is known and above ``limit``."""
        value = self.system(name)
        return value is not None and value > limit

    def said(self, *phases: str) -> str:
        """What phases cost together, in words."""
        return self.said_ms(sum(self.phase_ms(p) for p in phases))

    def said_ms(self, ms: float) -> str:
        """Milliseconds of a step, in words."""
        return f"{ms:.2f} ms of a {self.step_ms:.2f} ms step ({ms / self.step_ms:.0%})"


MADE_AGAIN = "made_again_step_ms"
"""Where a measurement's environment holds the milliseconds of a step when the first steps were made
again, where that was faster."""

CAUSES = "causes"
"""Where a measurement's environment holds what was found, for what is advised on it."""


def causes_of(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Names of findings in their order, each with its causes, as plain values."""
    return {finding.name: [str(cause) for cause in finding.causes] for finding in findings}


def saved_ms(evidence: Mapping[str, float], part: str) -> tuple[float, float] | None:
    """What steps took less without a part, and two standard errors of that; ``None``: unknown."""
    names = ("with_everything", f"without_{part}")
    if any(f"{name}_ms" not in evidence for name in names):
        return None
    whole, left = (evidence[f"{name}_ms"] for name in names)
    return whole - left, 2 * math.hypot(*(evidence.get(f"{name}_error_ms", 0.0) for name in names))


# -----------------------------------------------------------------------------
# Rules on memory, on what a device waits for, and on what the host does between steps.


def _memory(facts: Facts) -> Finding | None:
    retries = facts.evidence.get("allocator_retries", 0.0)
    total = _device_memory_gib(facts.measurement)
    peak = facts.measurement.peak_reserved_gib
    share = peak / total if peak is not None and total else None
    full = share is not None and share > facts.limits.reserved_memory
    if not (retries > 0 or full):
        return None
    words = [f"{retries:.0f} allocations had to be tried again"] if retries > 0 else []
    if full and peak is not None:
        words.append(f"{peak:.1f} of {total:.1f} GiB were reserved at the peak ({share:.0%})")
    return Finding(
        "memory_pressure",
        Severity.HIGH,
        ", ".join(words),
    )


_QUOTA_MODERATE_PERCENT = 5.0
_QUOTA_HIGH_PERCENT = 20.0


def _quota(facts: Facts) -> Finding | None:
    """A job that its container's CPU quota stops. Each processor that is stopped counts."""
    held = facts.system(THROTTLED) or 0.0
    if held < _QUOTA_MODERATE_PERCENT:
        return None
    return Finding(
        "cpu_quota",
        Severity.HIGH if held >= _QUOTA_HIGH_PERCENT else Severity.MODERATE,
        f"the CPU quota of the container stopped processes for {held:.0f}% of the time (cpu.stat)",
    )


def _device_memory_gib(measurement: Measurement) -> float | None:
    devices = measurement.environment.get("devices", [])
    stated = [float(d["memory_gib"]) for d in devices if "memory_gib" in d]
    read = [
        (d["memory_usage_megabytes"] + d["memory_free_megabytes"]) * MEGA / GIB
        for d in devices
        if "memory_usage_megabytes" in d and "memory_free_megabytes" in d
    ]
    return min([*stated, *read], default=None)


_MOST_OF_BUSY_PERCENT = 50.0
"""Of the processor time that is used: a job that uses less has others to thank for full ones."""


_READS_MEGABYTES_PER_S = 0.1
"""From here on a busy disk is one that is read; a slow one reads little more at random places."""


def _input(facts: Facts) -> Finding | None:
    share, limits = facts.share("dataloader_next"), facts.limits
    if share < limits.input_moderate:
        return None
    cause, why = _what_loading_waits_for(facts)
    severity = Severity.HIGH if share >= limits.input_high else Severity.MODERATE
    evidence = f"waiting for the next batch takes {facts.said('dataloader_next')}; {why}"
    return Finding("input_bound", severity, evidence, share, (cause,))


def _what_loading_waits_for(facts: Facts) -> tuple[str, str]:
    """The cause, and words for it."""
    limits = facts.limits
    if facts.above("cpu_iowait_percentage", limits.iowait_percent):
        waits = f"disks keep it waiting (iowait {facts.system('cpu_iowait_percentage'):.0f} %)"
        return DISK, waits
    if facts.above("disk_busy_percentage", limits.disk_busy_percent) and facts.above(
        "disk_read_megabytes_per_s", _READS_MEGABYTES_PER_S
    ):
        return DISK, (
            f"a disk keeps it waiting (it works {facts.system('disk_busy_percentage'):.0f} % of "
            f"the time, and {facts.system('disk_read_megabytes_per_s'):.1f} MB/s are read)"
        )
    used = facts.system("cpu_utilization_percentage")
    if facts.above("cpu_utilization_percentage", limits.cpu_busy_percent):
        own = facts.system("process_cpu_share_percentage")
        if own is not None and own < _MOST_OF_BUSY_PERCENT:
            return OTHER_JOBS, (
                f"other jobs fill the processors ({used:.0f} % busy, {own:.0f} % of it this job's)"
            )
        return PROCESSORS, f"preprocessing fills the processors ({used:.0f} % busy)"
    if facts.above("network_receive_megabytes_per_s", limits.network_megabytes_per_s):
        rate = facts.system("network_receive_megabytes_per_s")
        return NETWORK, f"data may come over the network ({rate:.0f} MB/s received)"
    why = "its cause was not seen" if used is None else _NOT_ITS_LIMIT
    workers = _loader_workers(facts.measurement)
    return UNKNOWN, why if workers is None else f"{why}; it has {workers} workers"


_NOT_ITS_LIMIT = "processors, disks and network are not its limit"


def _copy(facts: Facts) -> Finding | None:
    share = facts.share("to_device")
    if share <= facts.limits.to_device:
        return None
    return Finding(
        "host_to_device_copy",
        Severity.MODERATE,
        f"copying batches to the device takes {facts.said('to_device')}",
        share,
    )


def other_work(facts: Facts) -> Finding | None:
    """Time outside loading, passes, optimizer and communication.

    Where the passes were not seen they are in that time, and nothing can be said of it.
    """
    phases = facts.measurement.phases_ms
    if not any(name in phases for name in PASSES):
        return None
    ms = phases.get("other", 0.0) + max(0.0, facts.step_ms - sum(phases.values()))
    share, limit = ms / facts.step_ms, facts.limits.other
    if share <= limit:
        return None
    return Finding(
        "other_work",
        Severity.HIGH if share >= 2 * limit else Severity.MODERATE,
        f"what is neither loading, a pass nor the optimizer takes {facts.said_ms(ms)}",
        share,
    )


def idle_share(facts: Facts) -> float | None:
    """Share of the step in which the device does nothing; ``None`` where it was not watched."""
    busy_ms = facts.evidence.get("device_busy_ms")
    return None if busy_ms is None else max(0.0, 1 - busy_ms / facts.step_ms)


_RARELY = 0.1
"""Part of the calls of the place that calls most, up to which a place is not named."""


def sync_points(facts: Facts) -> Finding | None:
    """Calls that wait for values from the device, while the device then idles."""
    wait_ms = facts.evidence.get("sync_wait_ms", facts.phase_ms("from_device"))
    share, idle = wait_ms / facts.step_ms, idle_share(facts)
    if share <= facts.limits.sync_wait:
        return None
    idles = ""
    if idle is not None:
        # a host that only waits for work that is still to be done costs nothing, and what the
        # device waits for the loader is not these calls'
        loading = facts.share("dataloader_next")
        idle -= loading
        if idle <= facts.limits.sync_wait:
            return None
        share = min(share, idle)
        besides = ", waiting for batches apart" if loading >= 0.005 else ""
        idles = f"; the device is idle for {idle:.0%} of it{besides}"
    calls = facts.evidence.get("sync_calls_per_step")
    often = "" if calls is None else f" in {calls:.1f} calls a step"
    sites: dict[str, float] = facts.measurement.environment.get("sync_points", {})
    most = max(sites.values(), default=0.0)
    often_called = {at: count for at, count in sites.items() if count > _RARELY * most}
    where = ", ".join(
        f"{at.rpartition('-packages/')[2]} ({count:.2g})" for at, count in often_called.items()
    )
    return Finding(
        "sync_points",
        Severity.MODERATE,
        f"waiting for values from the device{often} takes {facts.said_ms(wait_ms)}{idles}"
        + (f"; called at {where}" if where else ""),
        share,
    )


def launching(facts: Facts) -> Finding | None:
    """A device that waits for launches: what it idles for nothing else that is named.

    A device that copies or communicates is busy.
    """
    idle, limit = idle_share(facts), 1 - facts.limits.device_busy
    if idle is None:
        return None
    named = [found.share or 0.0 for rule in (sync_points, other_work) if (found := rule(facts))]
    waits = idle - facts.share("dataloader_next") - sum(named)
    if waits <= limit:
        return None
    busy_ms = facts.evidence["device_busy_ms"]
    return Finding(
        "launch_bound",
        Severity.HIGH if waits >= 2 * limit else Severity.MODERATE,
        f"the device works {busy_ms:.2f} ms of a {facts.step_ms:.2f} ms step and waits for the "
        f"host to launch for {waits:.0%} of it",
        waits,
    )


def _optimizer(facts: Facts) -> Finding | None:
    share = facts.share("optimizer")
    if share <= facts.limits.optimizer:
        return None
    return Finding(
        "optimizer_bound",
        Severity.MODERATE,
        f"the optimizer takes {facts.said('optimizer')}",
        share,
    )


_MOST_OF_IT = 0.5
"""Part of the step that new shapes cost from which on it is severe."""


def _new_shapes(facts: Facts) -> Finding | None:
    """Steps that were faster when they were made again, as whoever measured them found out."""
    again_ms = facts.measurement.environment.get(MADE_AGAIN)
    if again_ms is None or again_ms >= facts.step_ms:
        return None
    share = 1 - again_ms / facts.step_ms
    return Finding(
        "new_shapes",
        Severity.HIGH if share >= _MOST_OF_IT else Severity.MODERATE,
        f"a step takes {facts.step_ms:.4g} ms, and {again_ms:.4g} ms when the same is made again "
        f"({share:.0%} less), as where kernels are planned for each new shape",
        share,
    )


# -----------------------------------------------------------------------------
# Rules on what ranks do to one another: a slow one, waiting by turns, and communication.


_CLEAR_ERRORS = 4.0
"""By how many standard errors a rank must be slower before it is called slow."""


_NAMED_FROM = 0.05
"""Part of what a slow rank takes longer from which a phase is named."""


RANK_PHASES = ("dataloader_next", "to_device", "forward", "optimizer")
"""Phases in which a rank works for itself. A slow rank's backward pass looks long on the others,
where communication is not told apart from it.
"""


def straggler(facts: Facts) -> Finding | None:
    """One rank that is slower than the others, in one phase or in several together.

    Where the error of a phase is not known, noise looks like a slow rank: nothing is said.
    """
    slower: dict[float | None, dict[str, float]] = {}
    for name in _own_phases(facts):
        excess = facts.evidence.get(f"straggler_{name}_excess_ms", 0.0)
        error = facts.evidence.get(f"{name}_error_ms")
        if error is not None and excess > _CLEAR_ERRORS * error:
            rank = facts.evidence.get(f"straggler_{name}_rank")
            slower.setdefault(rank, {})[name] = excess
    if not slower:
        return None
    rank, excesses = max(slower.items(), key=lambda item: sum(item[1].values()))
    worst = sum(excesses.values())
    waits = _others_wait_ms(facts)
    costs = worst if waits is None else min(worst, waits)
    share = costs / facts.step_ms
    if share <= facts.limits.straggler_excess:
        return None
    phases = [name for name, ms in excesses.items() if ms >= _NAMED_FROM * worst]
    who = "one rank" if rank is None else _name_of(facts.measurement, int(rank))
    if rank is not None and all(f"straggler_{name}_node" in facts.evidence for name in phases):
        host = facts.measurement.environment["ranks"][int(rank)]["host"]
        who = f"node {host}, on which every rank is slower than those elsewhere,"
    others = "the other" if facts.measurement.world_size == 2 else "the mean of the others"
    where = " and ".join(phases)
    longer = f"{who} takes {worst:.2f} ms a step longer than {others} in {where}"
    evidence = (
        f"{longer} ({share:.0%} of the step), and the others wait for it in their collectives"
        if costs == worst
        else f"{longer}, and the others wait {costs:.2f} ms for it in their collectives "
        f"({share:.0%} of the step)"
    )
    return Finding(
        "straggler",
        Severity.HIGH if share >= facts.limits.comm_high else Severity.MODERATE,
        evidence,
        share,
        _where_to_look(facts, phases),
    )


def _own_phases(facts: Facts) -> tuple[str, ...]:
    """Phases in which a rank waits for no other, as they were marked here."""
    return (*RANK_PHASES, *(("backward",) if "comm_least_ms" in facts.evidence else ()))


def _where_to_look(facts: Facts, phases: Sequence[str]) -> tuple[str, ...]:
    """Where a slow rank's cause is to be looked for."""
    if phases != ["dataloader_next"]:
        return (DEVICE,)
    loaders = (LOADERS,) if _loader_workers(facts.measurement) else ()
    return (DATA, *loaders)


def _others_wait_ms(facts: Facts) -> float | None:
    """What each of the others waits where one rank comes last; ``None``: waiting was not seen.

    It bounds what that rank costs: where it makes up for a long phase by a short one, nobody waits.
    """
    waits_ms, ranks = facts.measurement.phases_ms.get("rank_wait"), facts.measurement.world_size
    if waits_ms is None or ranks < 2:
        return None
    return waits_ms * ranks / (ranks - 1)


def _name_of(measurement: Measurement, rank: int) -> str:
    """A rank with its device, and its host where there are several."""
    ranks = measurement.environment.get("ranks", [])
    devices = measurement.environment.get("devices", [])
    words = []
    if len(devices) == measurement.world_size and "index" in devices[rank]:
        words = [f"gpu_{devices[rank]['index']}", str(devices[rank]["uuid"])]
    elif rank < len(ranks) and ranks[rank].get("device") not in (None, "cpu"):
        words = [f"GPU {ranks[rank]['device']}"]
    hosts = {r.get("host") for r in ranks}
    if rank < len(ranks) and len(hosts) > 1:
        words.append(f"on {ranks[rank]['host']}")
    return f"rank {rank} ({', '.join(words)})" if words else f"rank {rank}"


def imbalance(facts: Facts) -> Finding | None:
    """Ranks that wait for one another, now this one, now that one."""
    share, loading = facts.share("rank_wait"), facts.share("dataloader_next")
    explained = loading >= max(share, facts.limits.input_moderate)
    if share <= facts.limits.comm_moderate or explained or straggler(facts):
        return None
    seen = "comm_least_ms" in facts.evidence and any(
        f"{name}_error_ms" in facts.evidence for name in _own_phases(facts)
    )
    turns = (
        ", and none of them is the slow one throughout"
        if seen
        else "; whether one of them is slow throughout cannot be told from these timings"
    )
    return Finding(
        "rank_imbalance",
        Severity.MODERATE,
        f"ranks wait for one another for {facts.said('rank_wait')}{turns}",
        share,
    )


def communication(facts: Facts) -> Finding | None:
    """Communication itself, without the waiting for whoever comes last."""
    exposed_ms = facts.phase_ms("comm_exposed")
    saved = saved_ms(facts.evidence, "communication")
    if saved is not None:  # what leaving it out does not save is not communication
        exposed_ms = min(exposed_ms, max(0.0, sum(saved)))
    share = exposed_ms / facts.step_ms
    if share <= facts.limits.comm_moderate:
        return None
    return Finding(
        "communication_bound",
        Severity.HIGH if share >= facts.limits.comm_high else Severity.MODERATE,
        f"communication that nothing overlaps takes {facts.said_ms(exposed_ms)}",
        share,
    )


# -----------------------------------------------------------------------------
# What is said where no rule fires, and beside those that do.


_MOST = 0.5
"""Share of the step above which a part of it is named although no rule speaks of it."""


def _compute(facts: Facts) -> Finding | None:
    """A job that computes nearly all the time. What the device did itself comes before NVML."""
    if _hides_own_work(facts):
        return None
    limit, share = facts.limits.compute, facts.share(*PASSES)
    busy_ms = facts.evidence.get("device_busy_ms")
    used = facts.system("gpu_utilization_percentage")
    if busy_ms is not None:
        ms = max(0.0, busy_ms - facts.evidence.get("device_exposed_ms", 0.0))
        share = ms / facts.step_ms
        evidence = f"the device computes {facts.said_ms(ms)}"
        fires = share >= limit
    elif used is not None:
        evidence = f"the GPUs are busy {used:.0f} % of the time"
        fires = used >= limit * 100
    else:
        evidence = f"forward and backward take {facts.said(*PASSES)}"
        fires = share >= limit
    if not fires:
        return None
    return Finding("compute_bound", Severity.INFO, evidence + _mfu(facts), share or None)


def _hides_own_work(facts: Facts) -> bool:
    """Whether the script's own work may be what looks like the forward pass."""
    untold = facts.measurement.environment.get(WITHOUT_LOADER, False)
    return bool(untold) and "device_busy_ms" not in facts.evidence


def _mfu(facts: Facts) -> str:
    mfu = mfu_of(facts.measurement)
    return "" if mfu is None else f", at {mfu:.0%} of their peak (MFU)"


def _nothing_stands_out(facts: Facts) -> Finding:
    """What most of the step is, where it has no rule; else that nothing is."""
    if facts.share("forward") > _MOST and _hides_own_work(facts):
        return Finding(
            "mostly_before_backward",
            Severity.INFO,
            f"what comes before the backward pass takes {facts.said('forward')}: the forward pass, "
            "and without a DataLoader the script's own work and its reading of data, too",
            facts.share("forward"),
        )
    if facts.share(*PASSES) > _MOST:
        return Finding(
            "mostly_computing",
            Severity.INFO,
            f"forward and backward take {facts.said(*PASSES)}{_mfu(facts)}; nothing else stands "
            "out",
            facts.share(*PASSES),
        )
    phases = facts.measurement.phases_ms
    largest = max(phases, key=lambda name: phases[name], default="")
    if largest and facts.share(largest) > _MOST:
        return Finding(
            "mostly_one_phase",
            Severity.INFO,
            f"{largest} takes {facts.said(largest)}, and no rule says why",
            facts.share(largest),
        )
    profiled = "detailed_step_ms" in facts.evidence
    return Finding(
        "balanced",
        Severity.INFO,
        f"no phase of the {facts.step_ms:.2f} ms step stands out",
        causes=() if profiled else (UNPROFILED,),
    )


_MOST_KINDS = 2
"""Kinds of slow steps that are described, the others counted."""


def uneven_steps(facts: Facts) -> Finding | None:
    """Some steps take much longer: which, how often, what of, and whether the score has them."""
    measurement = facts.measurement
    kinds = measurement.environment.get(SLOW_STEPS) or slow_steps(measurement.step_seconds)
    kinds = sorted(kinds, key=lambda kind: -kind["share"])
    share = sum(kind["share"] for kind in kinds)
    if share <= facts.limits.uneven and all(kind["scored"] for kind in kinds):
        return None
    causes = {Cause(kind["cause"]) for kind in kinds}
    first, others = kinds[:_MOST_KINDS], kinds[_MOST_KINDS:]
    if len(others) == 1:
        first, others = kinds, []
    words = [told(kind) for kind in first]
    if others:
        rest = sum(kind["share"] for kind in others)
        words.append(f"{len(others)} other kinds of slow steps take {rest:.0%} of the time")
    return Finding(
        "uneven_steps",
        Severity.INFO,
        "; ".join(words),
        share,
        tuple(cause for cause in Cause if cause in causes),
    )


_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    _memory,
    _quota,
    _new_shapes,
    _input,
    _copy,
    straggler,
    imbalance,
    communication,
    other_work,
    sync_points,
    launching,
    _optimizer,
)


def _loader_workers(measurement: Measurement) -> Any:
    """Worker processes of a rank's loader; ``None`` where it is not known."""
    # The settings take their thresholds from this file, and ``--help`` needs no knob.
    from perfsearch.knobs.loader import WORKERS

    return WORKERS.of(measurement.in_force)
