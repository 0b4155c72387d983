"""How much a search may spend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Limits of the search stage; ``None`` is no limit. Confirmation has its own.

    Attributes:
        trials: search trials started (baseline, sentinels, confirmation, retries and screened
            configurations do not count).
        seconds: active search time, summed over resumes.
        gpu_hours: the same in device-hours.
        remaining_steps: how many steps the training will still run after the search.
        patience: search trials in a row without a new best after which it ends.

    """

    trials: int | None = 25
    seconds: float | None = None
    gpu_hours: float | None = None
    remaining_steps: int | None = None
    patience: int | None = None

    def seconds_left(self, seconds: float, devices: int) -> float | None:
        """Search time that is left after ``seconds``; ``None`` without a limit."""
        limits = [] if self.seconds is None else [self.seconds]
        if self.gpu_hours is not None:
            limits.append(self.gpu_hours * 3600 / devices)
        return max(0.0, min(limits) - seconds) if limits else None

    def spent(self, trials: int, seconds: float, devices: int) -> str | None:
        """Why nothing more may be started, or ``None``."""
        if self.trials is not None and trials >= self.trials:
            return f"budget.trials={self.trials} spent"
        if self.seconds is not None and seconds >= self.seconds:
            return f"budget.seconds={self.seconds:g} spent"
        if self.gpu_hours is not None and seconds * devices / 3600 >= self.gpu_hours:
            return f"budget.gpu_hours={self.gpu_hours:g} spent"
        return None
