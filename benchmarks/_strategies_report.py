"""Tables of the races, and the verdict against the peers, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from _races import BUDGET, Race, seconds_needed, trials_needed
from _surfaces import PRICED, SECONDS

ADAPTIVE_PEERS = (
    "optuna_tpe",
    "optuna_tpe_paid",
    "optuna_gp",
    "ng_TwoPointsDE",
    "ng_PortfolioDiscreteOnePlusOne",
    "ng_NGOpt",
    "ds_model",
)
"""Peers that choose by what was measured."""

FIXED_PEERS = ("random", "horovod", "ds_grid")
"""The others. Horovod's schedule adapts after twelve fixed trials or so."""

OWN = ("bayes", "bayes_unhinted", "auto")
"""Contenders whose verdict is written below each table."""

_FEWEST_SEEDS = 5
"""Contenders with fewer seeds on a surface are not reported."""

_RESAMPLES = 4000


def report(races: Sequence[Race]) -> str:
    """A summary, then a section a surface; surfaces with prices have a table of their own."""
    with_prices = [r for r in races if r.surface.endswith(PRICED)]
    surfaces = list(dict.fromkeys(r.surface for r in races if r not in with_prices))
    tables = {surface: groups for surface in surfaces if (groups := _groups(races, surface))}
    lines = _summary(tables)
    for surface, groups in tables.items():
        tolerance = next(iter(groups.values()))[0].tolerance
        lines += [
            f"## {surface}",
            "",
            f"Within {tolerance:.0%} of the best. Regret of what would be handed over, mean, in %.",
            "",
            "| contender | seeds | trials: median | 90% | seconds: median | 90% "
            "| regret at 10 | 20 | 40 | failed | s/ask mean | max | ends at |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_row(name, groups[name]) for name in sorted(groups, key=lambda n: _rank(groups[n]))),
            "",
            *_verdicts(groups),
            "",
        ]
    return "\n".join([*lines, *(by_price(with_prices) if with_prices else ())])


def by_price(races: Sequence[Race]) -> list[str]:
    """Seconds of own strategies that are told what trials cost, against those that are not."""
    prices = ", ".join(f"{scope} {seconds:g} s" for scope, seconds in SECONDS.items())
    lines = [
        "## Seconds where changes have prices",
        "",
        f"A change costs, beside the scored steps: {prices}. Seconds of trials until what would be "
        "handed over stays within the tolerance; a race that never gets there counts whole.",
        "",
        "| surface | contender | seeds | told prices: median | mean | not told: median | mean "
        "| ratio of medians | of means | paired difference (95%) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for surface in dict.fromkeys(r.surface for r in races):
        groups = _groups(races, surface)
        for name in groups:
            if name + "_unpriced" in groups:
                lines.append(_price_row(surface, name, groups[name], groups[name + "_unpriced"]))
    return [*lines, ""]


def _price_row(surface: str, name: str, told: Sequence[Race], untold: Sequence[Race]) -> str:
    left = {r.seed: seconds_needed(r) for r in told}
    right = {r.seed: seconds_needed(r) for r in untold}
    seeds = sorted(left.keys() & right.keys())
    ours, theirs = np.array([left[s] for s in seeds]), np.array([right[s] for s in seeds])
    mean, low, high = _interval(ours - theirs)
    medians, means = (np.median(ours), np.median(theirs)), (ours.mean(), theirs.mean())
    return (
        f"| {surface.removesuffix(PRICED)} | `{name}` | {len(seeds)} "
        f"| {medians[0]:.0f} | {means[0]:.0f} | {medians[1]:.0f} | {means[1]:.0f} "
        f"| {medians[0] / medians[1]:.2f} | {means[0] / means[1]:.2f} "
        f"| {mean:+.0f} s ({low:+.0f} to {high:+.0f}) |"
    )


def bootstrap(own: Sequence[Race], peer: Sequence[Race]) -> tuple[float, float, float]:
    """Mean difference in trials needed, own less peer, over shared seeds; 95% interval."""
    left = {r.seed: trials_needed(r) for r in own}
    right = {r.seed: trials_needed(r) for r in peer}
    pairs = np.array([left[s] - right[s] for s in sorted(left.keys() & right.keys())], dtype=float)
    return _interval(pairs)


def _interval(pairs: np.ndarray) -> tuple[float, float, float]:
    """Mean of paired differences, and its 95% interval."""
    generator = np.random.default_rng(0)
    means = generator.choice(pairs, (_RESAMPLES, len(pairs))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(pairs.mean()), float(low), float(high)


def _groups(races: Sequence[Race], surface: str) -> dict[str, list[Race]]:
    groups: dict[str, list[Race]] = {}
    for item in races:
        if item.surface == surface:
            groups.setdefault(item.contender, []).append(item)
    return {name: group for name, group in groups.items() if len(group) >= _FEWEST_SEEDS}


def _rank(group: Sequence[Race]) -> tuple[float, float]:
    needed = [trials_needed(r) for r in group]
    return statistics.median(needed), statistics.mean(needed)


def _best(groups: dict[str, list[Race]], names: Sequence[str]) -> str | None:
    present = [name for name in names if name in groups]
    return min(present, key=lambda name: _rank(groups[name])) if present else None


def _summary(tables: dict[str, dict[str, list[Race]]]) -> list[str]:
    lines = [
        "## Summary",
        "",
        "Median trials until within the tolerance; the ratio is to the best adaptive peer's.",
        "",
        "| surface | best adaptive peer | trials | `bayes` | ratio | `bayes_unhinted` | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for surface, groups in tables.items():
        best = _best(groups, ADAPTIVE_PEERS)
        if best is None:
            continue
        base = _rank(groups[best])[0]
        cells = [f"`{best}`", _shown(base)]
        for own in ("bayes", "bayes_unhinted"):
            median = _rank(groups[own])[0] if own in groups else None
            cells += ["-", "-"] if median is None else [_shown(median), f"{median / base:.2f}"]
        lines.append(f"| {surface} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _verdicts(groups: dict[str, list[Race]]) -> list[str]:
    lines = []
    for kind, peers in (("adaptive", ADAPTIVE_PEERS), ("fixed", FIXED_PEERS)):
        best = _best(groups, peers)
        for own in OWN if best is not None else ():
            if own not in groups:
                continue
            assert best is not None
            mean, low, high = bootstrap(groups[own], groups[best])
            ratio = _rank(groups[own])[0] / _rank(groups[best])[0]
            if kind == "fixed" and high < 0:
                continue
            lines.append(
                f"- `{own}` against the best {kind} peer, `{best}`: {ratio:.2f} of its median "
                f"trials; paired difference {mean:+.1f} trials (95% {low:+.1f} to {high:+.1f})."
            )
    return lines


def _shown(value: float) -> str:
    return f"{value:g}" if value <= BUDGET else f"{BUDGET}+"


def _row(name: str, group: Sequence[Race]) -> str:
    needed = [trials_needed(r) for r in group]

    def regret(trials: int) -> str:
        values = [1 - r.quality[min(trials, len(r.quality)) - 1] for r in group if r.quality]
        return f"{100 * statistics.mean(values):.1f}"

    spent = [
        r.seconds[n - 1] if n <= len(r.seconds) else math.inf
        for r, n in zip(group, needed, strict=True)
    ]

    def seconds(share: float) -> str:
        value = float(np.quantile(spent, share, method="higher"))
        return "-" if math.isinf(value) else f"{value:.0f}"

    failed = sum(r.failed for r in group) / max(1, sum(r.trials for r in group))
    mean_ask = statistics.mean(r.ask_seconds[1] for r in group)
    max_ask = max(r.ask_seconds[0] for r in group)
    return (
        f"| `{name}` | {len(group)} | {_shown(statistics.median(needed))} "
        f"| {_shown(round(float(np.quantile(needed, 0.9))))} | {seconds(0.5)} | {seconds(0.9)} "
        f"| {regret(10)} | {regret(20)} | {regret(40)} | {100 * failed:.0f}% "
        f"| {mean_ask:.3f} | {max_ask:.2f} | {statistics.mean(r.trials for r in group):.0f} |"
    )
