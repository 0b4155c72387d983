"""What holds a job back: an ordered set of rules over one measurement.

The order and most thresholds follow the rule sets of PyTorch's Kineto plugin, TensorFlow's input
pipeline analyzer and SageMaker Debugger. NVML's utilisation alone never decides: a collective that
spins, or a single busy multiprocessor, shows as 100 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from perfsearch.core.trial import Measurement
from perfsearch.metrics.diagnosis_device import launching, other_work, sync_points
from perfsearch.metrics.diagnosis_ranks import communication, imbalance, straggler
from perfsearch.metrics.diagnosis_steps import uneven_steps
from perfsearch.metrics.findings import PASSES, Facts, Finding, Severity, Thresholds
from perfsearch.metrics.throughput import mfu_of

GIB = 1024.0**3
MEGA = 1e6

_MOST_OF_BUSY_PERCENT = 50.0
"""Of the processor time that is used: a job that uses less has others to thank for full ones."""

_READS_MEGABYTES_PER_S = 0.1
"""From here on a busy disk is one that is read; a slow one reads little more at random places."""

_FASTER_DISK = "Keep the data on a faster disk or in memory, or read it in larger pieces."

_MOST = 0.5
"""Share of the step above which a part of it is named although no rule speaks of it."""

_COMPUTE_ADVICE = (
    "Lower precision, torch.compile or better kernels help; settings of the job hardly do."
)


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
    return found if beside is None else [*found, beside]


def report(findings: list[Finding]) -> str:
    """Findings as lines for a terminal or a note."""
    return "\n".join(f"- {finding}" for finding in findings)


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
        "Use a smaller micro-batch with more accumulation, activation checkpointing, or sharding.",
    )


def _input(facts: Facts) -> Finding | None:
    share, limits = facts.share("dataloader_next"), facts.limits
    if share < limits.input_moderate:
        return None
    workers = facts.measurement.in_force.get("dataloader_workers")
    if facts.above("cpu_iowait_percentage", limits.iowait_percent):
        cause = f"disks keep it waiting (iowait {facts.system('cpu_iowait_percentage'):.0f} %)"
        advice = _FASTER_DISK
    elif facts.above("disk_busy_percentage", limits.disk_busy_percent) and facts.above(
        "disk_read_megabytes_per_s", _READS_MEGABYTES_PER_S
    ):
        cause = (
            f"a disk keeps it waiting (it works {facts.system('disk_busy_percentage'):.0f} % of "
            f"the time, and {facts.system('disk_read_megabytes_per_s'):.1f} MB/s are read)"
        )
        advice = _FASTER_DISK
    elif facts.above("cpu_utilization_percentage", limits.cpu_busy_percent):
        used = facts.system("cpu_utilization_percentage")
        own = facts.system("process_cpu_share_percentage")
        if own is not None and own < _MOST_OF_BUSY_PERCENT:
            cause = (
                f"other jobs fill the processors ({used:.0f} % busy, {own:.0f} % of it this job's)"
            )
            advice = "Give the job processors of its own, or more dataloader workers."
        else:
            cause = f"preprocessing fills the processors ({used:.0f} % busy)"
            advice = "Do less a sample: preprocess once and store it, or do it on the device."
    elif facts.above("network_receive_megabytes_per_s", limits.network_megabytes_per_s):
        rate = facts.system("network_receive_megabytes_per_s")
        cause = f"data may come over the network ({rate:.0f} MB/s received)"
        advice = "Cache the data locally, or prefetch more of it."
    else:
        seen = facts.system("cpu_utilization_percentage") is not None
        cause = (
            "processors, disks and network are not its limit" if seen else "its cause was not seen"
        )
        advice = "Use more dataloader workers, or a larger prefetch factor."
        if workers is not None:
            cause += f"; it has {workers} workers"
    severity = Severity.HIGH if share >= limits.input_high else Severity.MODERATE
    evidence = f"waiting for the next batch takes {facts.said('dataloader_next')}; {cause}"
    return Finding("input_bound", severity, evidence, advice, share)


def _copy(facts: Facts) -> Finding | None:
    share = facts.share("to_device")
    if share <= facts.limits.to_device:
        return None
    return Finding(
        "host_to_device_copy",
        Severity.MODERATE,
        f"copying batches to the device takes {facts.said('to_device')}",
        "Use pin_memory with non_blocking copies, or send smaller types (uint8, bf16).",
        share,
    )


def _optimizer(facts: Facts) -> Finding | None:
    share = facts.share("optimizer")
    if share <= facts.limits.optimizer:
        return None
    return Finding(
        "optimizer_bound",
        Severity.MODERATE,
        f"the optimizer takes {facts.said('optimizer')}",
        "Use its fused or foreach implementation, shard its state, or accumulate gradients.",
        share,
    )


def _compute(facts: Facts) -> Finding | None:
    """A job that computes nearly all the time. What the device did itself comes before NVML."""
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
    return Finding(
        "compute_bound", Severity.INFO, evidence + _mfu(facts), _COMPUTE_ADVICE, share or None
    )


def _mfu(facts: Facts) -> str:
    mfu = mfu_of(facts.measurement)
    return "" if mfu is None else f", at {mfu:.0%} of their peak (MFU)"


def _nothing_stands_out(facts: Facts) -> Finding:
    """What most of the step is, where it has no rule; else that nothing is."""
    if facts.share(*PASSES) > _MOST:
        return Finding(
            "mostly_computing",
            Severity.INFO,
            f"forward and backward take {facts.said(*PASSES)}{_mfu(facts)}; nothing else stands "
            "out",
            _COMPUTE_ADVICE,
            facts.share(*PASSES),
        )
    phases = facts.measurement.phases_ms
    largest = max(phases, key=lambda name: phases[name], default="")
    if largest and facts.share(largest) > _MOST:
        return Finding(
            "mostly_one_phase",
            Severity.INFO,
            f"{largest} takes {facts.said(largest)}, and no rule says why",
            "Look at a few steps of it with metrics.trace=true.",
            facts.share(largest),
        )
    closely = "detailed_step_ms" in facts.evidence
    do = "Search" if closely else "Measure with metrics.detail=full, or search"
    return Finding(
        "balanced",
        Severity.INFO,
        f"no phase of the {facts.step_ms:.2f} ms step stands out",
        f"{do}: single causes are not in sight.",
    )


_RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    _memory,
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


def _device_memory_gib(measurement: Measurement) -> float | None:
    devices = measurement.environment.get("devices", [])
    stated = [float(d["memory_gib"]) for d in devices if "memory_gib" in d]
    read = [
        (d["memory_usage_megabytes"] + d["memory_free_megabytes"]) * MEGA / GIB
        for d in devices
        if "memory_usage_megabytes" in d and "memory_free_megabytes" in d
    ]
    return min([*stated, *read], default=None)
