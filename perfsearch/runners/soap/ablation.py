r"""What a chain's settings are worth on a captured job: every combination, some seeds of each.

    python -m perfsearch.runners.soap.ablation RUN_DIR/soap --seeds 10 --alpha 0.05 1 1e9 \
        --propagation 0 0.25 --start "data parallel" random --out DIRECTORY

Single chains in the simulator, from the tables of a search or of ``mode=measure``; nothing is run.
``ablation.csv`` has a row a chain, ``ablation.svg`` the best simulated step after each share of the
proposals, the median of the seeds, by setting.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from perfsearch.core.errors import BadInputError, nearest
from perfsearch.runners.soap.chains import DRAWS
from perfsearch.runners.soap.job import InputTables, read_tables
from perfsearch.soap.named import DATA_PARALLEL, OWN_BEST, named_plans
from perfsearch.soap.plan import Plan
from perfsearch.tracking.canvas import Axis, number

if TYPE_CHECKING:
    from perfsearch.soap.simulator.simulator import Simulator

RANDOM = "random"
MARKS = 20
"""Shares of the proposals after which the best is read."""
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#333333")


@dataclass(frozen=True)
class Setting:
    """What a chain is told.

    Attributes:
        start: name of the plan that it begins with; ``random`` draws one for each seed.
        alpha: how strictly worse plans are refused.
        acceptance: what ``alpha`` is per: ``percent`` or ``milliseconds``.
        propagation: share of proposals that carry a configuration over.

    """

    start: str
    alpha: float
    acceptance: str
    propagation: float

    @property
    def words(self) -> str:
        """For the figure."""
        unit = "ms" if self.acceptance == "milliseconds" else "%"
        return f"{self.start}, alpha {self.alpha:g}/{unit}, propagation {self.propagation:g}"


@dataclass(frozen=True)
class Run:
    """One chain.

    Attributes:
        setting: of it.
        seed: of its draws.
        start_ms: simulated step that it began with.
        best_ms: the best simulated step after each twentieth of the proposals.
        proposals: that it made; fewer than asked for where half of them brought nothing.
        accepted: of these.

    """

    setting: Setting
    seed: int
    start_ms: float
    best_ms: tuple[float, ...]
    proposals: int
    accepted: int


def simulator_of(tables: InputTables) -> tuple[Simulator, dict[str, Plan]]:
    """The simulator of a job, and the plans that a chain can begin with."""
    from perfsearch.soap.simulator.simulator import Simulator

    named = named_plans(tables.graph, tables.machine.devices)
    simulator = Simulator(
        tables.graph,
        tables.machine,
        tables.cost_of(tables.machine.can_replay),
        extra=tuple(named.values()),
    )
    return simulator, {**named, OWN_BEST: simulator.problem.own_best()}


def run(
    simulator: Simulator,
    named: Mapping[str, Plan],
    setting: Setting,
    proposals: int,
    seed: int,
) -> Run:
    """One chain of a setting."""
    from perfsearch.soap.simulator.chain import ChainOptions

    if setting.start == RANDOM:
        start = simulator.drift(named[DATA_PARALLEL], DRAWS * len(named[DATA_PARALLEL]), seed)
    else:
        start = named[setting.start]
    options = ChainOptions(
        alpha=setting.alpha,
        by_milliseconds=setting.acceptance == "milliseconds",
        carry=setting.propagation,
        return_every=proposals // 100,
    )
    before_ms = 1e3 * simulator.estimate(start).seconds
    found = simulator.search(start, proposals, options, seed)
    best, marks = before_ms, []
    rows = iter([*found.series, (proposals + 1, 0.0, 0.0, 0.0)])
    row = next(rows)
    for mark in range(1, MARKS + 1):
        while row[0] <= mark * proposals / MARKS:
            best = min(best, 1e3 * row[3])
            row = next(rows)
        marks.append(best)
    return Run(setting, seed, before_ms, tuple(marks), found.proposals, found.accepted)


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """A row a chain."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        marks = [f"best_ms_after_{100 * mark // MARKS}_percent" for mark in range(1, MARKS + 1)]
        head = ["start", "alpha", "acceptance", "propagation", "seed", "start_ms"]
        writer.writerow([*head, "proposals", "accepted", *marks])
        for each in runs:
            told = each.setting
            row = [told.start, told.alpha, told.acceptance, told.propagation, each.seed]
            times = [f"{ms:.6g}" for ms in (each.start_ms, *each.best_ms)]
            writer.writerow([*row, times[0], each.proposals, each.accepted, *times[1:]])


def medians(runs: Sequence[Run]) -> dict[Setting, tuple[float, ...]]:
    """By setting, the median of the seeds after each share of the proposals."""
    found: dict[Setting, list[Run]] = {}
    for each in runs:
        found.setdefault(each.setting, []).append(each)
    return {
        setting: tuple(
            statistics.median(column) for column in zip(*(r.best_ms for r in same), strict=True)
        )
        for setting, same in found.items()
    }


def figure(runs: Sequence[Run], proposals: int) -> str:
    """The medians as an SVG file's text; the best setting first."""
    lines = medians(runs)
    order = sorted(lines, key=lambda setting: lines[setting][-1])
    width, height, left = 860, 380, 70
    total = height + 18 * len(order) + 10
    x = Axis(0, proposals, left, width - 12, whole=True)
    y = Axis.around([ms for line in lines.values() for ms in line], height - 34, 20, log=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{total}" fill="white"/>',
        _text(4, 12, "best simulated step, ms: median of the seeds"),
        _text(width - 80, height - 4, "proposals"),
    ]
    for tick in y.ticks():
        parts.append(_line(left, y(tick), width - 12, y(tick), "#dddddd"))
        parts.append(_text(8, y(tick) + 4, number(tick)))
    parts += [_text(x(tick) - 12, height - 18, number(tick)) for tick in x.ticks()]
    for place, setting in enumerate(order):
        colour = _COLOURS[place % len(_COLOURS)]
        points = " ".join(
            f"{x((mark + 1) * proposals / MARKS):.1f},{y(ms):.1f}"
            for mark, ms in enumerate(lines[setting])
        )
        dashes = "" if place < len(_COLOURS) else ' stroke-dasharray="4 3"'
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        top = height + 18 * place + 12
        parts.append(_line(left, top - 4, left + 20, top - 4, colour))
        parts.append(_text(left + 26, top, f"{setting.words}: {lines[setting][-1]:.4g} ms"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(left: float, base: float, words: str) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}">{escape(words)}</text>'


def _line(left: float, top: float, right: float, bottom: float, colour: str) -> str:
    return (
        f'<line x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" '
        f'stroke="{colour}"/>'
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the combinations and write both files."""
    parser = argparse.ArgumentParser(
        prog="python -m perfsearch.runners.soap.ablation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("tables", type=Path, help="RUN_DIR/soap of a search or of mode=measure")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--proposals", type=int, default=50_000)
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.05, 1.0, 1e9])
    parser.add_argument(
        "--acceptance", nargs="+", default=["percent"], choices=["percent", "milliseconds"]
    )
    parser.add_argument("--propagation", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--start", nargs="+", default=[DATA_PARALLEL, RANDOM])
    parser.add_argument("--out", type=Path, default=Path())
    asked = parser.parse_args(words)
    if asked.seeds < 1 or asked.proposals < MARKS:
        parser.error(f"--seeds from 1 and --proposals from {MARKS} on are needed")
    try:
        simulator, named = simulator_of(read_tables(asked.tables))
    except BadInputError as error:
        parser.error(str(error))
    for start in asked.start:
        if start not in (*named, RANDOM):
            known = ", ".join([*named, RANDOM])
            parser.error(f"--start {start}: none of {known}. {nearest(start, [*named, RANDOM])}")
    asked.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for each in itertools.product(asked.start, asked.alpha, asked.acceptance, asked.propagation):
        setting = Setting(*each)
        same = [
            run(simulator, named, setting, asked.proposals, seed) for seed in range(asked.seeds)
        ]
        runs += same
        best = [one.best_ms[-1] for one in same]
        print(
            f"{setting.words}: best {min(best):.4g}, median {statistics.median(best):.4g}, worst "
            f"{max(best):.4g} ms of {same[0].start_ms:.4g}",
            flush=True,
        )
    write_csv(runs, asked.out / "ablation.csv")
    (asked.out / "ablation.svg").write_text(figure(runs, asked.proposals))
    print(f"written: {asked.out / 'ablation.csv'}, {asked.out / 'ablation.svg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
