"""What ``perfsearch.search`` returns: what a search came to, for a script or a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import same_value
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Purpose, Trial
from perfsearch.core.verdict import Interval
from perfsearch.pipeline.session import Result

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas
    import torch


@dataclass(repr=False)
class SearchResult(Result):
    """What a search came to.

    ``best`` is the configuration to use. Where nothing was shown to be faster it is the baseline's,
    which ``is_baseline`` says, and ``changed`` is empty. In a notebook it shows itself.
    """

    @classmethod
    def of(cls, result: Result) -> Self:
        """The same with what is of use from Python."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)})

    @property
    def speed_up(self) -> float | None:
        """Of ``best`` over the baseline, as the confirmation measured it in fresh processes.

        1.0 where ``best`` is the baseline; ``None`` where the baseline does not run, or the search
        was broken off, so that there is nothing to compare.
        """
        if self._why_nothing:
            return None
        if self.is_baseline:
            return 1.0
        return None if self.interval is None else self.interval.ratio

    @property
    def interval(self) -> Interval | None:
        """The 95% confidence interval of ``speed_up`` (``low``, ``high``, ``pairs``).

        ``None`` where ``best`` is the baseline: ``verdict.interval`` has that of the configuration
        which came closest.
        """
        winner = self.verdict.winner
        return None if winner is None else self.verdict.intervals.get(winner)

    @property
    def changed(self) -> dict[str, object]:
        """The settings of ``best`` that are not as in the baseline; empty where it is that."""
        before = None if self.baseline is None else self.baseline.configuration
        if self.is_baseline or before is None:
            return {}
        return {
            name: value
            for name, value in self.handed_over.items()
            if name not in before or not same_value(before[name], value)
        }

    @property
    def baseline(self) -> Trial | None:
        """The trial of the job as it is today; ``None`` where none was started."""
        return next((t for t in self.trials if t.purpose is Purpose.BASELINE), None)

    @property
    def unit(self) -> str:
        """Unit of the trials' ``objective``."""
        return self.objective.unit(
            next((t.measurement for t in self.trials if t.measurement), None)
        )

    @property
    def report(self) -> Path | None:
        """The page with charts and every trial; ``None`` where the search ended before it."""
        path = self.run_dir / "report.html"
        return path if path.is_file() else None

    def to_dataframe(self) -> pandas.DataFrame:
        """The trials as a pandas ``DataFrame``, by their numbers.

        A column for each setting, and ``purpose``, ``status``, ``objective`` (its unit is in
        ``attrs["unit"]``), ``step_ms``, ``samples_per_s``, ``peak_allocated_gib``, ``seconds`` and
        ``reason``. What a trial has no value for is missing (``NaN``, ``None``).
        """
        import pandas

        rows = [{"trial": t.number, **t.configuration, **_outcome(t)} for t in self.trials]
        columns = {name: None for row in rows for name in row} or {"trial": None}
        frame = pandas.DataFrame(rows, columns=list(columns)).set_index("trial")
        frame.attrs["unit"] = self.unit
        return frame

    def plot(self, axes: matplotlib.axes.Axes | None = None) -> matplotlib.axes.Axes:
        """Draw each trial's single reading, and the best so far against the baseline's.

        Single readings flatter the luckiest: ``speed_up`` is what was confirmed.

        Args:
            axes: of matplotlib, to draw on; by default new ones.

        """
        from matplotlib import pyplot

        axes = axes or pyplot.subplots()[1]
        shown = [t for t in self.trials if t.purpose.is_of_search]
        readings = {t.number: t.objective for t in shown if t.objective is not None}
        axes.plot(list(readings), list(readings.values()), "o", label="a reading")
        tried = [t.number for t in shown if t.purpose is not Purpose.SENTINEL]
        tried = [number for number in tried if number in readings]
        best = accumulate((readings[n] for n in tried), max if self.objective.maximise else min)
        axes.step(tried, list(best), where="post", label="best so far")
        if self.baseline is not None and self.baseline.objective is not None:
            axes.axhline(self.baseline.objective, color="gray", linestyle="--", label="baseline")
        axes.set(xlabel="trial", ylabel=self.unit, title=self.headline)
        axes.legend()
        return axes

    def apply(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.nn.parallel.DistributedDataParallel | None:
        """Wrap a model with ``best``, as ``perfsearch.apply`` does.

        Args:
            model: a module, or its wrapper between two steps; ``None``: what the script builds
                from now on.
            optimizer: of the model; it takes the implementation that was found.

        Raises:
            BadInputError: nothing was found that ran, or no ``DistributedDataParallel`` was tuned.

        """
        from perfsearch.api import apply

        if self._why_nothing:
            raise BadInputError(f"there is nothing to apply: {self._why_nothing}")
        return apply(self.run_dir, model, optimizer)

    @property
    def headline(self) -> str:
        """What came of it, in a few words."""
        if self._why_nothing:
            return self._why_nothing
        if self.is_baseline:
            shown = "inconclusive" if self.verdict.is_open else "no gain shown"
            return f"{shown}, so that best is the baseline"
        if self.interval is None:
            return "the baseline does not run; best does"
        return f"gain of {self.interval}"

    @property
    def _why_nothing(self) -> str:
        """Why there is no best, not even the baseline; empty where there is one."""
        if self.exit_code == ExitCode.NO_TRIAL_SUCCEEDED:
            return self.verdict.reason or "no trial succeeded"
        return "" if self.best else f"broken off: {self.reason}"

    def __repr__(self) -> str:
        changes = " ".join(_shown(self.changed))
        return (
            f"<{type(self).__name__} {self.headline}{': ' if changes else ''}{changes}; "
            f"{len(self.trials)} trials in {self.run_dir}>"
        )

    def _repr_html_(self) -> str:
        """The verdict and the changed settings, for notebooks."""
        before = {} if self.baseline is None else self.baseline.configuration
        rows = [
            [name, *_shown_values(before.get(name), value)] for name, value in self.changed.items()
        ]
        lines = [f"<b>{html.escape(self.headline)}</b>", html.escape(self.verdict.reason)]
        if rows:
            lines.append(_table(["setting", "today", "best"], rows))
        lines.append(f"{len(self.trials)} trials in {html.escape(str(self.run_dir))}")
        if self.report is not None:
            lines.append(f'<a href="{html.escape(_link(self.report))}">report</a>')
        return "".join(f"<div>{line}</div>" for line in lines)


def _link(file: Path) -> str:
    """Where a file is, as a notebook of the current directory finds it."""
    whole = file.absolute()
    if whole.is_relative_to(Path.cwd()):
        return quote(whole.relative_to(Path.cwd()).as_posix())
    return whole.as_uri()


def _outcome(trial: Trial) -> dict[str, Any]:
    """What a trial came to, as columns of a table."""
    found = trial.measurement
    measured = found if found is not None and found.step_seconds else None
    return {
        "purpose": trial.purpose.value,
        "status": trial.status.value,
        "objective": trial.objective,
        "step_ms": None if measured is None else measured.step_time_s * 1e3,
        "samples_per_s": None if measured is None else measured.samples_per_s,
        "peak_allocated_gib": None if found is None else found.peak_allocated_gib,
        "seconds": trial.seconds,
        "reason": trial.reason,
    }


def _shown(settings: dict[str, object]) -> list[str]:
    return [f"{n}={v}" for n, v in zip(settings, _shown_values(*settings.values()), strict=True)]


def _shown_values(*values: object) -> list[str]:
    from perfsearch.core.figures import show_value

    return [show_value(value) for value in values]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
