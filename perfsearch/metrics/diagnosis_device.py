"""Rules on what a device waits for: launches, values that are asked for, work between steps."""

from __future__ import annotations

from perfsearch.metrics.findings import PASSES, Facts, Finding, Severity


def idle_share(facts: Facts) -> float | None:
    """Share of the step in which the device does nothing; ``None`` where it was not watched."""
    busy_ms = facts.evidence.get("device_busy_ms")
    return None if busy_ms is None else max(0.0, 1 - busy_ms / facts.step_ms)


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
        "Move logging, metrics, checkpoints, evaluation and Python between steps out of the step, "
        "or do them every N steps.",
        share,
    )


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
    where = ", ".join(f"{site} ({count:g})" for site, count in sites.items())
    return Finding(
        "sync_points",
        Severity.MODERATE,
        f"waiting for values from the device{often} takes {facts.said_ms(wait_ms)}{idles}"
        + (f"; called at {where}" if where else ""),
        "Call .item(), .cpu() and print of tensors less often, or after the step.",
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
        "Use torch.compile or CUDA graphs, a fused or foreach optimizer, or a larger micro-batch.",
        waits,
    )
