"""The tables of ``gains.py``, from the records of its sittings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from _gain_cases import CASES

from perfsearch.core.verdict import Interval

WANTED_SHARE = 0.9
"""Of the best reordered speed-up of the grid, at least so much is to be confirmed by the search."""

Record = dict[str, Any]


def report(records: Sequence[Record]) -> str:
    """All tables as Markdown; of a search that was made several times the last one counts."""
    lines = [_about(record) for record in records if record["part"] == "about"]
    lines = [*dict.fromkeys(lines), ""]
    sides = [Side(records, case.name) for case in CASES]
    sides = [side for side in sides if side.records]
    head = ["script", "as it is, samples/s", "best of the grid, reordered", "the search confirms",
            "of the grid's best", "found", "search, s", "without perfsearch: before, after",
            "best of the grid, altering"]  # fmt: skip
    lines += _table(head, [row for side in sides for row in _rows(side)])
    shares = [share for side in sides if (share := side.share(side.search(""))) is not None]
    good = sum(share >= WANTED_SHARE for share in shares)
    minutes = sum(record.get("seconds", 0.0) for record in records) / 60
    lines += [
        "",
        f"With the search's defaults at least {WANTED_SHARE:.0%} of the grid's best on {good} of "
        f"{len(shares)}. All starts and searches together took {minutes:.1f} minutes.",
    ]
    for side in sides:
        lines += ["", f"### {side.name}", *_details(side)]
    return "\n".join(lines)


def _about(about: Record) -> str:
    on = ", ".join(about["devices"]) or "a CPU"
    changed = " with changes" if about.get("dirty") else ""
    commit = f"Commit {about['commit'][:7]}{changed}, " if "commit" in about else ""
    return f"{commit}{about['date']}; {on}, torch {about['torch']}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


class Side:
    """What is known of one script.

    Args:
        records: of all scripts.
        name: of this one.

    """

    def __init__(self, records: Sequence[Record], name: str) -> None:
        self.name = name
        self.records = [record for record in records if record["key"] == name]

    @property
    def searched_with(self) -> list[str]:
        """What the searches were given beside their time, each once; their defaults first."""
        return sorted({r["words"] for r in self.records if r["part"] == "search"})

    def search(self, words: str) -> Record | None:
        """The last search that was given these words."""
        found = [r for r in self.records if r["part"] == "search" and r["words"] == words]
        return found[-1] if found else None

    def rates(self, altering: bool) -> dict[str, list[float]]:
        """The grid's rates by options, the baseline's under the empty text."""
        rates: dict[str, list[float]] = {}
        for r in self.records:
            if r["part"] == "grid" and r["rate"] and r["altering"] is altering:
                rates.setdefault(r["options"], []).append(r["rate"])
        return rates

    @property
    def before(self) -> float | None:
        """The baseline's rate in the grid."""
        found = self.rates(altering=False).get("")
        return statistics.fmean(found) if found else None

    def best(self, altering: bool) -> tuple[str, float] | None:
        """The grid's best options and their speed-up; the baseline where nothing is faster."""
        rates = {o: statistics.fmean(r) for o, r in self.rates(altering).items()}
        if self.before is None or not rates:
            return None
        options = max(rates, key=lambda o: rates[o])
        return options, rates[options] / self.before

    def share(self, search: Record | None) -> float | None:
        """The confirmed speed-up, of the grid's best reordered one; 0 of a search that failed."""
        best = self.best(altering=False)
        if best is None or search is None:
            return None
        return (_confirmed(search) or 0.0) / best[1]

    def handed_over(self, search: Record) -> dict[str, float | None]:
        """What the script's own clock says of both arms of the hand-over; empty without one."""
        later = self.records[self.records.index(search) + 1 :]
        starts = [*itertools.takewhile(lambda r: r["part"] == "hand-over", later)]
        arms: dict[str, list[Record]] = {}
        for start in starts:
            arms.setdefault(start["arm"], []).append(start)
        return {
            arm: statistics.fmean(s["rate"] for s in each) if all(s["rate"] for s in each) else None
            for arm, each in arms.items()
        }


def _confirmed(search: Record) -> float | None:
    """The speed-up that is handed over: 1 where there is no gain; ``None`` without a result."""
    summary = search.get("summary")
    if search["rc"] != 0 or not summary:
        return None
    if summary["is_baseline"]:
        return 1.0
    return float(summary["speed_up"]["ratio"]) if summary["speed_up"] else None


# -----------------------------------------------------------------------------
# How it is shown.


def _rows(side: Side) -> list[list[str]]:
    """A row for each search, or one for the grid alone."""
    before = "-" if side.before is None else f"{side.before:.1f}"
    best, altering = (_best_text(side.best(kind)) for kind in (False, True))
    rows = []
    for words in side.searched_with:
        search = side.search(words)
        assert search is not None
        share = side.share(search)
        told = "-" if share is None else f"{share:.0%}"
        rows.append([
            f"`{side.name}`, `{words}`" if words else f"`{side.name}`", before, best,
            _verdict(search), told if share is None or share >= WANTED_SHARE else f"**{told}**",
            _found(search), f"{search['seconds']:.0f}", _alone(side.handed_over(search)), altering,
        ])  # fmt: skip
    return rows or [[f"`{side.name}`", before, best, *["-"] * 5, altering]]


def _best_text(best: tuple[str, float] | None) -> str:
    if best is None:
        return "-"
    options, ratio = best
    return f"{ratio - 1:+.0%}: `{options}`" if options else "none: nothing is faster than as it is"


def _verdict(search: Record) -> str:
    summary = search.get("summary")
    if search["rc"] != 0 or not summary:
        return f"**nothing**: {_how(search)}"
    interval = summary["speed_up"]
    shown = Interval(**interval).gain if interval else ""
    if summary["is_baseline"]:
        return f"**no gain**: {shown}" if shown else "**no gain**"
    return shown or "a rescue, no speed-up"


def _how(record: Record) -> str:
    """How a start ended that has no result."""
    return "ended at its time limit" if record["rc"] is None else f"exit code {record['rc']}"


def _found(search: Record) -> str:
    summary = search.get("summary")
    if not summary or summary["is_baseline"]:
        return "-"
    winner = next(t for t in search["trials"] if t["number"] == summary["trial"])
    return f"`{_pairs(winner['differs'])}`"


def _pairs(knobs: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def _alone(arms: dict[str, float | None]) -> str:
    if not arms:
        return "-"
    before, after = arms.get("baseline"), arms.get("handed over")
    shown = ", ".join("failed" if rate is None else f"{rate:.1f}" for rate in (before, after))
    return f"{shown} ({after / before - 1:+.0%})" if before and after else shown


def _details(side: Side) -> list[str]:
    lines: list[str] = []
    grid = [record for record in side.records if record["part"] == "grid"]
    for altering in (False, True):
        chosen = [record for record in grid if record["altering"] is altering]
        if chosen:
            kind = "altering" if altering else "reordered"
            head = [f"grid, {kind}", "samples/s", "gain", "s"]
            lines += ["", *_table(head, [_of_start(record, side.before) for record in chosen])]
    for words in side.searched_with:
        search = side.search(words)
        assert search is not None
        summary = search.get("summary") or {}
        last = search["lines"][-1] if search["lines"] else "nothing was printed"
        given = f" with `{words}`" if words else ""
        lines += ["", f"The search{given}: {summary.get('verdict') or last}."]
        head = ["trial", "purpose", "status", "objective", "s", "differs from the baseline", "why"]
        if search.get("trials"):
            lines += ["", *_table(head, [_of_trial(trial) for trial in search["trials"]])]
    return lines


def _of_start(record: Record, before: float | None) -> list[str]:
    options = f"`{record['options']}`" if record["options"] else "as it is"
    seconds = f"{record['seconds']:.0f}"
    if not record["rate"]:
        why = record["lines"][-1] if record["lines"] else "nothing was printed"
        return [options, f"{_how(record)}: {_cell(why)}", "-", seconds]
    gain = f"{record['rate'] / before - 1:+.0%}" if before else "-"
    return [options, f"{record['rate']:.1f}", gain, seconds]


def _of_trial(trial: Record) -> list[str]:
    objective = "-" if trial["objective"] is None else f"{trial['objective']:.4g}"
    seconds = "-" if trial["seconds"] is None else f"{trial['seconds']:.1f}"
    differs = f"`{_pairs(trial['differs'])}`" if trial["differs"] else "-"
    return [str(trial["number"]), trial["purpose"], trial["status"], objective, seconds, differs,
            _cell(trial["reason"] or "")]  # fmt: skip


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]
