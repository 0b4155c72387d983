"""What tuning while it trains is told. No torch here: the launcher reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.config.options import ConfigError, build_options, plain_value
from perfsearch.core.errors import nearest
from perfsearch.core.knob import Numerics
from perfsearch.core.option import option
from perfsearch.knobs import effect_order
from perfsearch.knobs.base import Use

PREFIX = "autotune"

TUNABLE = effect_order(Use.ONLINE)
"""Every knob that can change between two steps, the one with the largest expected effect first."""


@dataclass(frozen=True)
class AutotuneOptions:
    """Options of ``perfsearch.autotune`` and, as ``--autotune-NAME``, of ``perfsearch-run``.

    Attributes:
        level: 1 tunes; 0 leaves the wrapper as it is.
        warmup_samples: samples at the start of training that are thrown away.
        warmup_time: seconds of training before the first sample.
        steps_per_sample: steps that one score is of; slow ones among them, which may come again,
            make them more.
        sampling_confidence_time: seconds that a sample covers at least; more steps are taken
            until it does.
        discard_steps: steps thrown away after each change; buckets are laid out anew in the second.
        max_samples: configurations to try, today's apart.
        gaussian_process_noise: standard deviation of the noise on unit-variance scores; ``None``
            learns it.
        min_gain: it ends when no configuration promises a larger relative gain.
        log_file: CSV of what was tried; ``None`` writes none.
        start_from: log of an earlier run of the same job, whose trials count as known.
        freeze: log of an earlier run, whose best is put into force, and nothing is tuned.
        knobs: as ``runner.knobs``: a scalar fixes, a list or a range narrows, ``search`` asks for a
            knob that is off by default.
        numerics: the most that a tuned knob may do to the computation.
        time_limit_s: seconds for putting a configuration into force, and for each of its steps.
        retune_on_drift: whether to tune again when the time of a step has changed for good.
        drift_tolerance: relative change of the time of a step that counts as such.
        drift_steps: steps between two checks of it.
        seed: of every random draw.

    """

    level: int = option(1, low=0, high=1)
    warmup_samples: int = option(1, low=0)
    warmup_time: float = option(0.0, low=0)
    steps_per_sample: int = option(8, low=1)
    sampling_confidence_time: float = option(0.0, low=0)
    discard_steps: int = option(3, low=2)
    max_samples: int = option(18, low=1)
    gaussian_process_noise: float | None = option(None, above=0, high=1)
    min_gain: float = option(0.005, low=0, high=1)
    log_file: Path | None = None
    start_from: Path | None = None
    freeze: Path | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    numerics: Numerics = Numerics.REORDERED
    time_limit_s: float = option(60.0, above=0)
    retune_on_drift: bool = False
    drift_tolerance: float = option(0.15, above=0)
    drift_steps: int = option(50, low=5)
    seed: int = option(0, low=0, high=2**32 - 1)

    def __post_init__(self) -> None:
        if self.start_from is not None and self.freeze is not None:
            raise ConfigError(
                f"{PREFIX}.freeze",
                f"{PREFIX}.freeze={self.freeze} and {PREFIX}.start_from={self.start_from}: only one"
                " of them at a time. freeze tunes nothing; start_from goes on tuning.",
            )
        for name in self.knobs:
            if name not in TUNABLE:
                key = f"{PREFIX}.knobs.{name}"
                raise ConfigError(
                    key, f"{key}: cannot change between two steps. {nearest(name, TUNABLE)}"
                )
        if self.log_file is not None and self.log_file.is_dir():
            raise ConfigError(
                f"{PREFIX}.log_file",
                f"{PREFIX}.log_file={self.log_file}: this is a directory. Give a file, such as "
                f"{self.log_file / 'tuning.csv'}.",
            )
        for name in ("start_from", "freeze"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(
                    f"{PREFIX}.{name}",
                    f"{PREFIX}.{name}={path}: there is no such file. Give the log that an earlier "
                    f"run wrote with {PREFIX}.log_file.",
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> AutotuneOptions:
        """Check plain values and give them their types.

        Raises:
            ConfigError: the message names key, value and what is allowed.

        """
        return build_options(cls, values, PREFIX)

    def to_plain(self) -> dict[str, Any]:
        """Plain values that ``from_mapping`` takes, for JSON."""
        plain: dict[str, Any] = plain_value(asdict(self))
        return plain

    @property
    def most_steps(self) -> int:
        """Steps after which tuning has ended at the latest, where samples are not stretched."""
        per_sample = self.discard_steps + self.steps_per_sample
        return self.warmup_samples * self.steps_per_sample + per_sample * (self.max_samples + 6)
