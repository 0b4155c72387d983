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

from perfsearch.core.errors import printable
from perfsearch.core.knob import Configuration, same_value
from perfsearch.core.objective import Objective
from perfsearch.core.trial import Purpose, Status, Trial

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

    from perfsearch.config.schema import Settings

_REFRESHES_PER_S = 4

_PROPOSING = "search"
"""The stage that has a budget, and asks for what to try."""


class View:
    """A plain log, a line for each event, for where there is no terminal.

    Args:
        objective: what is optimised.
        trials: the budget's number of search trials, where it has one.
        stream: where lines go; standard output when left out.

    """

    def __init__(
        self,
        objective: Objective | None = None,
        trials: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.objective = objective or Objective()
        self.trials = trials
        self.stream = stream
        self.unread = False
        self.searched = 0
        self.baseline: Trial | None = None
        self.running: dict[int, tuple[Purpose, Configuration, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.running = {}

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage of the pipeline begins."""
        self.line(f"-- {name}: {detail}" if detail else f"-- {name}")

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
        is_best = best_so_far is not None and best_so_far.number == trial.number
        searched = trial.purpose is Purpose.SEARCH
        self.searched += searched
        best = "  best so far" if searched and is_best and self.beats_baseline(trial) else ""
        remark = f"  ({message})" if message else ""
        self.line(f"{self.describe(trial)}{best}{remark}")

    def note(self, text: str) -> None:
        """Say something."""
        if text:
            self.line(text)

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""
        self.line(f"warning: {text}")

    def result(
        self, rows: Sequence[Mapping[str, Any]], verdict_line: str, files: Sequence[str]
    ) -> None:
        """Show the closing table, the verdict and where the files are.

        Args:
            rows: ``label``, ``trial``, ``objective``, ``unit``, ``interval`` (``ratio``, ``low``,
                ``high``, or ``None``) and ``confirmed``; the baseline first.
            verdict_line: the verdict in one line.
            files: paths that were written.

        """
        cells = result_cells(rows)
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        for row in cells:
            line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            self.line(line.rstrip())
        self.line(verdict_line)
        for file in files:
            self.line(f"  {file}")

    def line(self, text: str) -> None:
        """Print one line; a search goes on without a reader (``perfsearch ... | head``)."""
        if self.unread:
            return
        try:
            print(printable(text), file=self.stream or sys.stdout, flush=True)
        except OSError:
            self.unread = True

    def describe(self, trial: Trial) -> str:
        """A trial on one line: number, purpose, how it ended, what differs from the baseline."""
        head = f"trial {trial.number:>3} {trial.purpose:<8}"
        knobs = differing_knobs(trial, self.baseline)
        if not knobs and trial.purpose in (Purpose.CONFIRM, Purpose.BESIDE):
            knobs = "the baseline"
        if trial.status is Status.OK and trial.measurement is not None:
            step_ms = trial.measurement.step_time_s * 1e3
            value = show_objective(trial.objective, self.objective.unit(trial.measurement))
            outcome = f"{value:>15}  {step_ms:>6.4g} ms/step  {self.against_baseline(trial):>6}"
        else:
            reason = f": {trial.reason}" if trial.reason else ""
            outcome = f"{trial.status}{reason}"
        return f"{head} {outcome}  {knobs}".rstrip()

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
    """Shows the trial that runs, the best so far against the baseline, and what is left.

    Args:
        objective: what is optimised.
        trials: the budget's number of search trials, where it has one.
        stream: where to draw; standard output when left out.
        console: a console to draw on instead of one for ``stream``.

    """

    def __init__(
        self,
        objective: Objective | None = None,
        trials: int | None = None,
        stream: TextIO | None = None,
        console: Console | None = None,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(objective, trials, stream)
        self.console = console or Console(file=stream, highlight=False)
        self.stage_name = ""
        self.best: Trial | None = None
        self.seconds_left: tuple[float, float] | None = None
        self._live = Live(
            self, console=self.console, refresh_per_second=_REFRESHES_PER_S, transient=True
        )

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
        self.stage_name = name
        self._print(_text().append(name, "bold").append(f": {detail}"))

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
        self.seconds_left = None if seconds_left is None else (seconds_left, time.monotonic())
        super().trial_finished(trial, best_so_far, baseline, seconds_left, message)

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""
        self._print(_text(f"warning: {text}", "yellow"))

    def result(
        self, rows: Sequence[Mapping[str, Any]], verdict_line: str, files: Sequence[str]
    ) -> None:
        """Show the closing table, the verdict and where the files are."""
        from rich.table import Table

        self.stage_name, self.running = "", {}
        header, *body = result_cells(rows)
        table = Table(*header[:-1], box=None, pad_edge=False, header_style="dim")
        table.add_column(header[-1], overflow="fold")
        for index in (1, 2, 3):
            table.columns[index].justify = "right"
        for cells in body:
            style = "bold green" if cells[0] == "best" else ""
            table.add_row(*(_text(cell) for cell in cells), style=style)
        self._print()
        self._print(table)
        self._print(_text(verdict_line, "bold"))
        for file in files:
            self._print(_text(f"  {file}"), soft_wrap=True)

    def line(self, text: str) -> None:
        """Print one line above the block."""
        self._print(_text(text), soft_wrap=True)

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
        yield self._best_line()
        if self.stage_name == _PROPOSING:
            yield self._left_line()

    def _running_lines(self) -> Iterator[Text]:
        if not self.running:
            doing = ": choosing what to try next" if self.stage_name == _PROPOSING else ""
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

    def _left_line(self) -> Text:
        parts = []
        if self.trials is not None:
            parts.append(f"{max(0, self.trials - self.searched)} of {self.trials} trials")
        if self.seconds_left is not None:
            left, since = self.seconds_left
            parts.append(show_seconds(max(0.0, left - (time.monotonic() - since))))
        text = _text(row=True).append("  left     ", "cyan")
        return text.append(", ".join(parts) or "no limit")


def _text(text: str = "", style: str = "", row: bool = False) -> Text:
    """Text that is drawn as it is, without markup; a row of the block is cut to the width."""
    from rich.text import Text

    return Text(printable(text), style, no_wrap=row, overflow="ellipsis" if row else None)


def open_view(settings: Settings) -> View:
    """The view that suits standard output: live in a terminal, plain lines elsewhere.

    Lines, too, where a program proposes: it may ask a person at the same terminal.
    """
    objective = settings.objective
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if is_terminal and settings.strategy.name != "external":
        return LiveView(objective, settings.budget.trials)
    return View(objective, settings.budget.trials)


def result_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The closing table as text, its header first."""
    unit = str(rows[0]["unit"]) if rows else ""
    cells = [["", "trial", unit, "ms/step", "speed-up (95% interval)", "differs from the baseline"]]
    baseline: Trial | None = None
    for row in rows:
        trial: Trial = row["trial"]
        baseline = baseline or trial
        interval = row["interval"]
        if interval is not None:
            speed_up = interval.short
        elif trial is baseline:
            speed_up = "1"
        else:
            speed_up = _unconfirmed(row, rows[0])
        step = row["step_ms"]
        cells.append(
            [
                str(row["label"]),
                str(trial.number),
                "" if row["objective"] is None else f"{row['objective']:.4g}",
                "" if step is None else f"{step:.4g}",
                speed_up,
                "" if trial is baseline else differing_knobs(trial, baseline) or "nothing",
            ]
        )
    return cells


def _unconfirmed(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """How the objectives shown compare, where there is no interval; empty where one lacks."""
    here, before = row["objective"], baseline["objective"]
    if not here or not before:
        return ""
    ratio = before / here if row["unit"] == "ms/step" else here / before
    readings = "one reading each" if row["confirmed"] else "one reading"
    return f"{ratio:.3f}x ({readings}, not confirmed)"


_MOST_KNOBS = 24
"""Knobs named in a line; more are operators of a model, which trials.csv has one by one."""
_MOST_VALUES = 4


def differing_knobs(trial: Trial, baseline: Trial | None) -> str:
    """``name=value`` of each knob that is not as in the baseline; of very many, how often which."""
    if baseline is None:
        return ""
    before = baseline.configuration
    shown = {
        name: show_value(value)
        for name, value in trial.configuration.items()
        if name not in before or not same_value(before[name], value)
    }
    if len(shown) <= _MOST_KNOBS:
        return " ".join(f"{name}={value}" for name, value in shown.items())
    counted = Counter(shown.values()).most_common()
    often = ", ".join(f"{value} {count} times" for value, count in counted[:_MOST_VALUES])
    more = f" and {len(counted) - _MOST_VALUES} more values" if len(counted) > _MOST_VALUES else ""
    return f"{len(shown)} of {len(trial.configuration)} knobs differ: {often}{more}"


def show_value(value: object) -> str:
    """A knob's value as on the command line, real numbers to four digits."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_objective(value: float | None, unit: str) -> str:
    """The objective with its unit."""
    return "" if value is None else f"{value:.4g} {unit}"


def show_seconds(seconds: float) -> str:
    """A duration as ``1:02:03`` or ``2:03``."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    clock = f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else clock
