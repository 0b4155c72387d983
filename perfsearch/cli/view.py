"""What a person sees of a search while it runs: a line for each event, and a closing table.

Where the output is a terminal, a block that is redrawn stands below them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from perfsearch.cli.bar import CONFIRM, SEARCH, Progress
from perfsearch.cli.layout import (
    LEAST_WIDTH,
    card_lines,
    row_lines,
    screen_width,
    table_lines,
    wrapped,
)
from perfsearch.core.errors import printable
from perfsearch.core.figures import decimals, show_changes, show_number, show_seconds, show_value
from perfsearch.core.knob import Configuration, same_value
from perfsearch.core.objective import Objective
from perfsearch.core.trial import Purpose, Status, Trial

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

    from perfsearch.config.schema import Settings
    from perfsearch.pipeline.cards import Card

_REFRESHES_PER_S = 4

_BAR_WIDTHS = {100: 24, 0: 10}
"""By the screen's columns from which on the bar is so wide."""

_MOST_CHANGES = 6
"""Changed knobs that a trial's line names before it counts the others."""

_WIDTHS = (5, 11, 9, 8)
"""Columns of a trial's line: its number, the objective, milliseconds a step, the gain."""

_AGAIN = {
    Purpose.BASELINE: "the baseline",
    Purpose.SENTINEL: "the baseline again",
    Purpose.BESIDE: "the baseline, beside others",
    Purpose.CONFIRM: "the baseline",
}


class View:
    """A plain log, a line for each event, for where there is no terminal.

    Args:
        objective: what is optimised.
        progress: how far the search is.
        stream: where lines go; standard output when left out.

    """

    def __init__(
        self,
        objective: Objective | None = None,
        progress: Progress | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.objective = objective or Objective()
        self.progress = progress or Progress()
        self.stream = stream
        self.unread = False
        self.baseline: Trial | None = None
        self.running: dict[int, tuple[Purpose, Configuration, float]] = {}
        self._has_header = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running = {}

    @property
    def width(self) -> int | None:
        """Columns of the screen; ``None`` where nobody says, and lines are as long as they are."""
        return screen_width()

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage of the pipeline begins."""
        self._begin(name)
        self.line(f"-- {name}: {detail}" if detail else f"-- {name}")

    def _begin(self, name: str) -> None:
        self.progress.stage(name)
        self._has_header = False

    def trial_started(self, number: int, purpose: Purpose, configuration: Configuration) -> None:
        """Take note that a trial runs; a plain log tells of it when it ends."""
        self.running[number] = purpose, configuration, time.monotonic()

    def trial_finished(
        self,
        trial: Trial,
        best_so_far: Trial | None,
        baseline: Trial | None,
        seconds_left: float | None,
        message: str = "",
    ) -> None:
        """Say how a trial ended, and how it compares.

        Args:
            trial: the trial.
            best_so_far: the best of those that count, this one included.
            baseline: trial 0, once it is measured.
            seconds_left: what is left of ``budget.seconds``; ``None`` without that limit.
            message: a remark, such as that a record was served.

        """
        self.running.pop(trial.number, None)
        self.baseline = baseline or self.baseline
        self.progress.ended(trial, seconds_left)
        is_best = best_so_far is not None and best_so_far.number == trial.number
        is_best = is_best and trial.purpose is Purpose.SEARCH and self.beats_baseline(trial)
        remarks = ["best so far"] if is_best else []
        remarks += [message] if message else []
        remark = "".join(f"  ({word})" for word in remarks)
        for line in self.describe(trial, remark):
            self.print(line)

    def expects(self, trials: int) -> None:
        """Take note that the stage takes about so many trials."""
        self.progress.expected = trials

    def note(self, text: str) -> None:
        """Say something."""
        if text:
            self.line(text)

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""
        self.line(f"warning: {text}")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Show a table; the first row is its header, the last column may be long."""
        for line in table_lines(rows, self.width):
            self.print(line)

    def card(self, card: Card) -> None:
        """Show labelled lines under a title."""
        self.print("")
        for line in card_lines(card, self.width):
            self.print(line)

    def result(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the closing table.

        Args:
            rows: ``label``, ``trial``, ``objective``, ``unit``, ``step_ms``, ``interval`` (or
                ``None``) and ``confirmed``; the baseline first, then the fastest.

        """
        self.print("")
        self.table(result_cells(rows))

    def line(self, text: str) -> None:
        """Print a text, its lines wrapped to the screen."""
        for line in wrapped(printable(text), self.width, indent=2):
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line, nothing in it steers the terminal; a search goes on without a reader
        (``perfsearch ... | head``).
        """
        if self.unread:
            return
        try:
            print(printable(line), file=self.stream or sys.stdout, flush=True)
        except OSError:
            self.unread = True

    def describe(self, trial: Trial, remark: str = "") -> Iterator[str]:
        """A trial's line, below a header where it is the stage's first: number, readings, gain
        over the baseline, and what differs from it.
        """
        names = changes(trial, self.baseline)
        again = _AGAIN.get(trial.purpose, "") if not names else ""
        changed = printable(again or show_changes(names, _MOST_CHANGES))
        if trial.status is not Status.OK or trial.measurement is None:
            told = trial.reason not in ("", str(trial.status))
            reason = f": {trial.reason}" if told else ""
            about = f" ({changed})" if changed else ""
            failed = (str(trial.number), printable(f"{trial.status}{reason}{about}{remark}"))
            yield from row_lines(failed, _WIDTHS[:1], self.width, left=0)
            return
        unit = self.objective.unit(trial.measurement)
        if not self._has_header:
            self._has_header = True
            header = ("trial", unit, "ms/step", "gain", "differs from the baseline")
            yield from row_lines(header, _WIDTHS, self.width, left=0)
        known = self.baseline if self.baseline and self.baseline.objective else trial
        reading = show_number(trial.objective, decimals(known.objective))
        step_ms = trial.measurement.step_time_s * 1e3
        places = decimals(1e3 * (known.measurement or trial.measurement).step_time_s)
        cells = (
            str(trial.number),
            reading,
            show_number(step_ms, places),
            self.against_baseline(trial),
            f"{changed}{printable(remark)}".strip(),
        )
        yield from row_lines(cells, _WIDTHS, self.width, left=0)

    def beats_baseline(self, trial: Trial) -> bool:
        """Whether its reading is better than the baseline's."""
        base = self.baseline
        if trial.cost is None or base is None or base.cost is None:
            return False
        return trial.cost < base.cost

    def against_baseline(self, trial: Trial) -> str:
        """Speed-up over the baseline's single reading, as a signed percentage.

        Nothing for a confirmation: what that compares is measured side by side.
        """
        base = self.baseline
        if trial.cost is None or base is None or base.cost is None or trial.number == base.number:
            return ""
        if trial.purpose is Purpose.CONFIRM:
            return ""
        return f"{(base.cost / trial.cost - 1) * 100:+.1f}%"


class LiveView(View):
    """Shows the trial that runs, the best so far against the baseline, and how long the rest takes.

    Args:
        objective: what is optimised.
        progress: how far the search is.
        stream: where to draw; standard output when left out.
        console: a console to draw on instead of one for ``stream``.

    """

    def __init__(
        self,
        objective: Objective | None = None,
        progress: Progress | None = None,
        stream: TextIO | None = None,
        console: Console | None = None,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(objective, progress, stream)
        self.console = console or Console(file=stream, highlight=False)
        self.stage_name = ""
        self.best: Trial | None = None
        self._live = Live(
            self, console=self.console, refresh_per_second=_REFRESHES_PER_S, transient=True
        )

    @property
    def width(self) -> int | None:
        """Columns of the terminal."""
        return max(self.console.width, LEAST_WIDTH)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        with suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage of the pipeline begins."""
        self._begin(name)
        self.stage_name = name
        self._styled(f"{name}: {detail}" if detail else name, "bold")

    def trial_finished(
        self,
        trial: Trial,
        best_so_far: Trial | None,
        baseline: Trial | None,
        seconds_left: float | None,
        message: str = "",
    ) -> None:
        """Let the trial scroll by, and show the new best and what is left."""
        self.best = best_so_far
        super().trial_finished(trial, best_so_far, baseline, seconds_left, message)

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""
        self._styled(f"warning: {text}", "yellow")

    def card(self, card: Card) -> None:
        """Show labelled lines under a title."""
        self.print("")
        title, *lines = card_lines(card, self.width)
        self._print(_text(title, "bold"), soft_wrap=True)
        for line in lines:
            self.print(line)

    def result(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the closing table; nothing runs any more."""
        self.stage_name, self.running = "", {}
        super().result(rows)

    def print(self, line: str) -> None:
        """Print one line above the block."""
        self._print(_text(line), soft_wrap=True)

    def _styled(self, text: str, style: str) -> None:
        for line in wrapped(printable(text), self.width, indent=2):
            self._print(_text(line, style), soft_wrap=True)

    def _print(self, *shown: RenderableType, soft_wrap: bool = False) -> None:
        """Print above the block; a search goes on without a terminal, as after a hang-up."""
        if self.unread:
            return
        try:
            self.console.print(*shown, soft_wrap=soft_wrap)
        except OSError:
            self.unread = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The block: what runs, the best so far, what is left."""
        if not self.stage_name:
            return
        yield from self._running_lines()
        if self.stage_name != CONFIRM:  # which does not compare with the search's readings
            yield self._best_line()
        yield self._bar()

    def _running_lines(self) -> Iterator[Text]:
        if not self.running:
            doing = ": choosing what to try next" if self.stage_name == SEARCH else ""
            yield _text(f"  {self.stage_name}{doing}", row=True)
        before = self.baseline.configuration if self.baseline else {}
        for number, (purpose, configuration, began) in list(self.running.items()):
            elapsed = show_seconds(time.monotonic() - began)
            knobs = " ".join(
                f"{k}={show_value(v)}" for k, v in configuration.items() if before.get(k, ...) != v
            )
            text = _text(row=True).append("  running  ", "cyan")
            yield text.append(f"trial {number} {purpose}  {elapsed}  {knobs}")

    def _best_line(self) -> Text:
        text = _text(row=True).append("  best     ", "cyan")
        base, best = self.baseline, self.best
        if base is None or base.status is not Status.OK:
            return text.append("no baseline yet")
        unit = self.objective.unit(base.measurement)
        shown = show_objective(base.objective, unit)
        if best is None or not self.beats_baseline(best):
            return text.append(f"the baseline, {shown}")
        value = show_objective(best.objective, unit)
        return (
            text.append(f"{value}  ")
            .append(self.against_baseline(best), "green")
            .append(f"  trial {best.number}, one reading; baseline {shown}")
        )

    def _bar(self) -> RenderableType:
        """One bar over search and confirmation."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        progress = self.progress
        done, left_s = progress.done, progress.left_s
        lasts = "" if left_s is None else f"about {show_seconds(left_s)} left"
        told = ", ".join(
            word for word in (f"{self.stage_name} {progress.count}".strip(), lasts) if word
        )
        grid = Table.grid(padding=(0, 1))
        wide = next(wide for least, wide in _BAR_WIDTHS.items() if self.console.width >= least)
        bar = ProgressBar(total=1.0, completed=done, width=wide)
        grid.add_row(_text(f"  {done:4.0%}    ", "cyan"), bar, _text(told, row=True))
        return grid


def _text(text: str = "", style: str = "", row: bool = False) -> Text:
    """Text that is drawn as it is, without markup; a row of the block is cut to the width."""
    from rich.text import Text

    return Text(printable(text), style, no_wrap=row, overflow="ellipsis" if row else None)


def open_view(settings: Settings) -> View:
    """The view that suits standard output: live in a terminal, plain lines elsewhere.

    Lines, too, where a program proposes: it may ask a person at the same terminal.
    """
    progress = Progress.of(settings)
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if is_terminal and settings.strategy.name != "external":
        return LiveView(settings.objective, progress)
    return View(settings.objective, progress)


def result_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The closing table as text, its header first."""
    unit = str(rows[0]["unit"]) if rows else ""
    cells = [["", "trial", unit, "ms/step", "gain (95% interval)", "differs from the baseline"]]
    baseline: Trial | None = None
    for row in rows:
        trial: Trial = row["trial"]
        baseline = baseline or trial
        interval = row["interval"]
        if interval is not None:
            gain = interval.gain
        elif trial is baseline:
            gain = ""
        else:
            gain = _unconfirmed(row, rows[0])
        named = show_changes(changes(trial, baseline), _MOST_CHANGES) or "nothing"
        cells.append(
            [
                str(row["label"]),
                str(trial.number),
                show_number(row["objective"], decimals(rows[0]["objective"] or row["objective"])),
                show_number(row["step_ms"], decimals(rows[0]["step_ms"] or row["step_ms"])),
                gain,
                "" if trial is baseline else named,
            ]
        )
    return cells


def _unconfirmed(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """How the objectives shown compare, where there is no interval; empty where one lacks."""
    here, before = row["objective"], baseline["objective"]
    if not here or not before:
        return ""
    ratio = before / here if row["unit"] == "ms/step" else here / before
    return told_unconfirmed(ratio, bool(row["confirmed"]))


def told_unconfirmed(ratio: float, each: bool) -> str:
    """A speed-up that no interval is known of, with what it rests on.

    Args:
        ratio: of throughputs.
        each: whether it is of one fresh start of each; else of one reading of the search.

    """
    return f"{ratio - 1:+.1%} ({'one reading each' if each else 'one reading'})"


_MOST_KNOBS = 24
"""Knobs named in a line; more are operators of a model, which trials.csv has one by one."""
_MOST_VALUES = 4


def changes(trial: Trial, baseline: Trial | None) -> list[str]:
    """``name=value`` of each knob that is not as in the baseline; of very many, how often which."""
    if baseline is None:
        return []
    before = baseline.configuration
    shown = {
        name: show_value(value)
        for name, value in trial.configuration.items()
        if name not in before or not same_value(before[name], value)
    }
    if len(shown) <= _MOST_KNOBS:
        return [f"{name}={value}" for name, value in shown.items()]
    counted = Counter(shown.values()).most_common()
    often = ", ".join(f"{value} {count} times" for value, count in counted[:_MOST_VALUES])
    more = f" and {len(counted) - _MOST_VALUES} more values" if len(counted) > _MOST_VALUES else ""
    return [f"{len(shown)} of {len(trial.configuration)} knobs differ: {often}{more}"]


def show_objective(value: float | None, unit: str) -> str:
    """The objective with its unit."""
    return "" if value is None else f"{show_number(value, decimals(value))} {unit}"
