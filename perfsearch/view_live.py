"""The view for a terminal: trials scroll by above a block that is redrawn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from perfsearch.core.knob import Configuration
from perfsearch.core.objective import Objective
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.view import View, result_cells, show_objective, show_seconds, show_value

_REFRESHES_PER_S = 4

_PROPOSING = "search"
"""The stage that has a budget, and asks for what to try."""


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
        self._print(f"[bold]{escape(name)}[/bold]: {escape(detail)}")

    def trial_started(self, number: int, purpose: Purpose, configuration: Configuration) -> None:
        """Show the trial in the block, with the time that it has taken so far."""
        super().trial_started(number, purpose, configuration)
        self.began = time.monotonic()

    def trial_finished(
        self,
        trial: Trial,
        best_so_far: Trial | None,
        baseline: Trial | None,
        seconds_left: float | None,
        message: str = "",
    ) -> None:
        """Let the trial scroll by, and take over the new best and what is left."""
        self.best = best_so_far
        self.seconds_left = None if seconds_left is None else (seconds_left, time.monotonic())
        super().trial_finished(trial, best_so_far, baseline, seconds_left, message)

    def warning(self, text: str) -> None:
        """Say something that should not be missed."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def result(
        self, rows: Sequence[Mapping[str, Any]], verdict_line: str, files: Sequence[str]
    ) -> None:
        """Show the closing table, the verdict and where the files are."""
        self.stage_name, self.running = "", None
        header, *body = result_cells(rows)
        table = Table(*header[:-1], box=None, pad_edge=False, header_style="dim")
        table.add_column(header[-1], overflow="fold")
        for index in (1, 2, 3):
            table.columns[index].justify = "right"
        for cells in body:
            style = "bold green" if cells[0] == "best" else ""
            table.add_row(*(escape(cell) for cell in cells), style=style)
        self._print()
        self._print(table)
        self._print(Text(verdict_line, style="bold"))
        for file in files:
            self._print(Text(f"  {file}"), soft_wrap=True)

    def line(self, text: str) -> None:
        """Print one line above the block."""
        self._print(Text(text), soft_wrap=True)

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
        yield self._running_line()
        yield self._best_line()
        if self.stage_name == _PROPOSING:
            yield self._left_line()

    def _running_line(self) -> Text:
        if self.running is None:
            doing = ": choosing what to try next" if self.stage_name == _PROPOSING else ""
            return Text(f"  {self.stage_name}{doing}", overflow="ellipsis")
        number, purpose, configuration = self.running
        elapsed = show_seconds(time.monotonic() - self.began)
        before = self.baseline.configuration if self.baseline else {}
        knobs = " ".join(
            f"{k}={show_value(v)}" for k, v in configuration.items() if before.get(k, ...) != v
        )
        text = Text(no_wrap=True, overflow="ellipsis")
        return text.append("  running  ", "cyan").append(
            f"trial {number} {purpose}  {elapsed}  {knobs}"
        )

    def _best_line(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis").append("  best     ", "cyan")
        base, best = self.baseline, self.best
        if base is None or base.status is not Status.OK:
            return text.append("no baseline yet")
        shown = show_objective(base.objective, self.objective.unit)
        if best is None or not self.beats_baseline(best):
            return text.append(f"the baseline, {shown}")
        value = show_objective(best.objective, self.objective.unit)
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
        text = Text(no_wrap=True, overflow="ellipsis").append("  left     ", "cyan")
        return text.append(", ".join(parts) or "no limit")
