"""What a search shows while it was started from Python: as the command, less, or in a notebook."""

from __future__ import annotations

import html
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from perfsearch.cli.view import View, open_view, show_objective
from perfsearch.core.errors import printable
from perfsearch.core.knob import Configuration
from perfsearch.core.trial import Purpose, Trial

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

OnTrial = Callable[[Trial], object]


def opener(
    quiet: bool = False, on_trial: OnTrial | None = None
) -> Callable[[Settings], AbstractContextManager[View]]:
    """What opens the view of a search.

    Args:
        quiet: show warnings only.
        on_trial: is told of each trial that has ended.

    """

    @contextmanager
    def opened(settings: Settings) -> Iterator[View]:
        with _chosen(settings, quiet) as view:
            if on_trial is not None:
                _tell(view, on_trial)
            yield view

    return opened


def _chosen(settings: Settings, quiet: bool) -> View:
    if quiet:
        return QuietView()
    display = notebook_display()
    if display is None:
        return open_view(settings)
    return NotebookView(display, settings)


def _tell(view: View, on_trial: OnTrial) -> None:
    """Have ``view`` tell of each trial that it was told of."""
    finished = view.trial_finished

    def trial_finished(trial: Trial, *others: Any, **named: Any) -> None:
        finished(trial, *others, **named)
        on_trial(trial)

    view.trial_finished = trial_finished  # type: ignore[method-assign]


class _Nowhere(io.StringIO):
    """Takes what is printed, and keeps nothing of it."""

    def write(self, text: str) -> int:
        return len(text)


class QuietView(View):
    """Says nothing but warnings."""

    def __init__(self) -> None:
        super().__init__(stream=_Nowhere())

    def warning(self, text: str) -> None:
        """Say it on standard error."""
        print(f"perfsearch: warning: {printable(text)}", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# In a notebook: the lines of a plain log, below one that changes.


def notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` where output goes to a notebook's cell; ``None`` anywhere else."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    if running is None or getattr(running, "kernel", None) is None:
        return None
    found: Callable[..., Any] = sys.modules["IPython.display"].display
    return found


class _Html:
    """HTML that a notebook shows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text


class NotebookView(View):
    """A bar with the stage, the trial that runs and the best so far, and a line for each event.

    Args:
        display: IPython's.
        settings: of the search.

    """

    def __init__(self, display: Callable[..., Any], settings: Settings) -> None:
        super().__init__(settings.objective)
        self.stage_name = ""
        self.best: Trial | None = None
        self._most = settings.budget.trials
        self._tried = 0
        self._handle = display(_Html(""), display_id=True)

    def __exit__(self, *of_error: Any) -> None:
        super().__exit__(*of_error)
        self._handle.update(_Html(""))  # the lines say what came of it

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage of the pipeline begins."""
        self.stage_name = name
        super().stage(name, detail)
        self._update()

    def trial_started(self, number: int, purpose: Purpose, configuration: Configuration) -> None:
        """Show that a trial runs."""
        super().trial_started(number, purpose, configuration)
        self._update()

    def trial_finished(
        self,
        trial: Trial,
        best_so_far: Trial | None,
        baseline: Trial | None,
        seconds_left: float | None,
        message: str = "",
    ) -> None:
        """Say how a trial ended, and show the new best."""
        self.best = best_so_far
        self._tried += trial.purpose is Purpose.SEARCH
        super().trial_finished(trial, best_so_far, baseline, seconds_left, message)
        self._update()

    def _update(self) -> None:
        """Draw the changing line anew; a search goes on without whoever looks at it."""
        words = [self.stage_name, *(f"trial {number} runs" for number in self.running)]
        if self.best is not None and self.beats_baseline(self.best):
            shown = show_objective(self.best.objective, self.objective.unit(self.best.measurement))
            words.append(f"best so far {shown}, {self.against_baseline(self.best)}, one reading")
        bar = ""
        if self._most:
            tried = min(self._tried, self._most)
            bar = f'<progress value="{tried}" max="{self._most}"></progress> '
            words.insert(0, f"{tried} of {self._most} trials")
        text = ", ".join(word for word in words if word)
        self._handle.update(_Html(f"<div>{bar}{html.escape(text)}</div>"))
