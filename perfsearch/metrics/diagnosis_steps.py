"""Steps that are not like the others."""

from __future__ import annotations

import statistics

from perfsearch.metrics.findings import Facts, Finding, Severity

_LONG = 1.5
"""A long step takes so many times the median."""
_FEWEST = 2
"""One alone may be the machine's own doing."""


def uneven_steps(facts: Facts) -> Finding | None:
    """Some steps take much longer, which no score shows: those are of the median step."""
    seconds = facts.measurement.step_seconds
    median, mean = statistics.median(seconds), statistics.fmean(seconds)
    long = sum(s > _LONG * median for s in seconds)
    if long < _FEWEST or (mean - median) / mean <= facts.limits.uneven:
        return None
    return Finding(
        "uneven_steps",
        Severity.INFO,
        f"{long} of {len(seconds)} steps take more than {_LONG:g} times the median of "
        f"{median * 1e3:.2f} ms, so that the mean is {mean * 1e3:.2f} ms "
        f"(+{mean / median - 1:.0%}); rates and scores are those of the median step",
        "Look at what happens in those steps: where loaders start again with each epoch, "
        "persistent_workers or longer epochs save it, though no score shows that.",
        (mean - median) / mean,
    )
