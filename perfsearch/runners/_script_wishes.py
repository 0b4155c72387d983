"""What a user asks of the timings of a script, and what of that there is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfsearch.config_schema import MetricsSettings, ObjectiveSettings
from perfsearch.core.narrow import is_auto
from perfsearch.instrument.facts import Facts

if TYPE_CHECKING:
    from perfsearch.config import Settings

_WINDOW = "its phases are timed in the scored steps of every trial, and looked at nowhere else"


@dataclass(frozen=True)
class Wishes:
    """The keys that a script may not be able to honour.

    Attributes:
        searches: whether anything but the script as it is will be measured.
        by_bound: whether knobs are searched in the order of what they can give.
        min_gain: ``objective.min_gain``.
        metrics: the ``metrics.*`` keys.

    """

    searches: bool = True
    by_bound: bool = False
    min_gain: float = ObjectiveSettings.min_gain
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

    @classmethod
    def of(cls, settings: Settings) -> Wishes:
        """Read them from the settings."""
        return cls(
            searches=settings.mode == "search",
            by_bound=is_auto(settings.runner.options),
            min_gain=settings.objective.min_gain,
            metrics=settings.metrics,
        )

    def remarks(
        self, on_gpu: bool, facts: Facts | None, unheeded: Mapping[str, str] | None = None
    ) -> list[str]:
        """What has no effect, a line a key.

        Args:
            on_gpu: whether the script uses GPUs.
            facts: what it has built; ``None`` where it did not get so far.
            unheeded: what was asked of knobs and has no effect, and why.

        """
        lost = self._of_metrics()
        if self.searches and facts is not None:
            lost.update(unheeded or {})
        unbounded = _why_unbounded(on_gpu, facts)
        if unbounded and self.searches:
            if self.by_bound:
                lost["runner.knobs=auto"] = f"{unbounded}, so all knobs are searched together"
            if self.min_gain not in (0, ObjectiveSettings.min_gain):
                lost[f"objective.min_gain={self.min_gain:g}"] = unbounded
        return [f"warning: {key} has no effect on this script: {why}" for key, why in lost.items()]

    def _of_metrics(self) -> dict[str, str]:
        lost: dict[str, str] = {}
        if self.metrics.detail == "full":
            lost["metrics.detail=full"] = _WINDOW
        for name in ("begin_step", "end_step"):
            step = getattr(self.metrics, name)
            if step is not None:
                lost[f"metrics.{name}={step}"] = (
                    "the scored steps begin when step times have settled (3 to 8 steps)"
                )
        return lost


def _why_unbounded(on_gpu: bool, facts: Facts | None) -> str:
    """Why a script's phases do not bound what knobs can give; empty where they do."""
    why = "its host works ahead of the GPU" if on_gpu else facts.why_unbounded() if facts else ""
    return f"its phases do not bound what knobs can give, as {why}" if why else ""
