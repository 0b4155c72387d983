"""The contract of a runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from perfsearch.config.schema import default_run_dir
from perfsearch.core.hardware import Environment
from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings


@dataclass(frozen=True)
class Plan:
    """How a configuration is to be measured.

    Attributes:
        number: the trial's number; logs and noise of a replay are drawn by it.
        purpose: why it is run.
        fresh: whether processes are started anew for it, whatever is still warm.
        attempt: 0, or which retry after an infrastructure failure this is.
        time_limit_s: seconds after which it is ended, start-up apart.
        scored_steps: smallest and largest number of scored steps.
        scored_seconds: wall time that the scored steps should cover.
        log_directory: where each rank's log goes.
        detail: ``light`` timings, or ``full``: a close look at further steps after the scored ones.
        begin_step: first step that the close look covers, counted from 1 at the trial's start;
            ``None``: the first after the scored ones, which is also the earliest.
        end_step: the last one.
        trace: whether the close look leaves a Chrome trace among the trial's logs.
        stop_above_cost_s: stop early once a step surely takes longer than this, in seconds.

    """

    number: int
    purpose: Purpose = Purpose.SEARCH
    fresh: bool = False
    attempt: int = 0
    time_limit_s: float = 300.0
    scored_steps: tuple[int, int] = (8, 60)
    scored_seconds: float = 1.0
    log_directory: Path = Path("logs")
    detail: str = "light"
    begin_step: int | None = None
    end_step: int | None = None
    trace: bool = False
    stop_above_cost_s: float | None = None


@dataclass
class Outcome:
    """What came of measuring a configuration: a measurement, or a typed failure."""

    status: Status
    measurement: Measurement | None = None
    reason: str = ""
    log_path: str = ""
    fresh_process: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class Runner(ABC):
    """Knows what can be tuned and measures it. It never sees the strategy.

    ``space`` holds the searched knobs and ``pinned`` every other knob's fixed value;
    configurations and ``baseline`` hold the searched ones only. ``devices`` counts ranks.
    ``remarks`` are lines for the user to see before anything is started.

    A subclass lives in its own module ``perfsearch.runners.NAME``, with its keys in
    ``conf/runner/NAME.yaml``. ``close`` is called however the search ends.
    """

    space: Space
    baseline: dict[str, Value]
    pinned: dict[str, Value] = {}
    no_knobs: str = ""
    """Why it has no keys ``runner.knobs``, and what to do instead; empty where it has them."""
    devices: int = 1
    trains: bool = True
    """Whether ``measure`` runs the job, so that it can be looked at closely (``mode=profile``)."""
    remarks: Sequence[str] = ()
    requires: ClassVar[Mapping[str, str]] = {}
    """Packages that it needs beside perfsearch's own, and the extra that brings each."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Runner:
        """Build it from the checked settings; ``settings.runner.options`` are its own keys.

        Everything that is wrong with the input is found here, before anything is started.

        Raises:
            BadInputError: with the message for the user; the command ends with exit code 2.

        """
        raise NotImplementedError(f"{cls.__name__} cannot be built from settings")

    @classmethod
    def for_script(cls, settings: Settings) -> tuple[str, Mapping[str, Any]] | None:
        """``runner.device`` and ``runner.knobs`` for the runner of ``workload=script``.

        Where this is not ``None``, that runner starts the script in place of this one.

        Raises:
            BadInputError: as ``from_settings``.

        """
        return None

    @classmethod
    def settle(cls, settings: Settings) -> Settings:
        """Fill in top-level keys from the runner's own files, before anything is built.

        Raises:
            BadInputError: as ``from_settings``.

        """
        return settings

    @abstractmethod
    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Run the configuration; every failure of it is an outcome, never an exception."""

    def open(self, run_dir: Path) -> None:  # noqa: B027 - a runner may have nothing to prepare
        """Get ready, its devices being held: end what a killed run of the same search left.

        Args:
            run_dir: the search's directory; it may be a numbered neighbour of the one asked for.

        """

    def identity(self) -> dict[str, str]:
        """What a result depends on apart from knobs: model, world size, device names, versions."""
        return {}

    def device_set(self) -> str:
        """Name of what must not be shared with another search at the same time; empty: nothing."""
        return ""

    def hints(self, trials: Sequence[Trial]) -> Hints:
        """What is known of the space; predictions may use ``trials``, which grows."""
        return Hints(baseline=dict(self.baseline))

    def screen(self, configuration: Configuration) -> str | None:
        """Why it is refused by arithmetic alone, at no cost; ``None`` when it may run."""
        return None

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """What to expect of the configuration; pure in ``trials``."""
        return Prediction()

    def advice(self, trials: Sequence[Trial]) -> str:
        """What the user could do where no trial succeeded; empty where nothing is known."""
        return ""

    def closing_lines(self, configuration: Configuration, trials: Sequence[Trial]) -> list[str]:
        """What to print of the configuration that is handed over, beside its knobs."""
        return []

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Write the configuration in forms that work without perfsearch; return the files."""
        return []

    def settings_of(self, configuration: Configuration) -> dict[str, Any]:
        """The ``runner.*`` keys under which exactly ``configuration`` runs, and nothing else."""
        return {"knobs": {**self.pinned, **configuration}}

    def follow_up(self, configuration: Configuration) -> int:
        """Do what the user wants done with the result, once it is on record; an exit code."""
        return 0

    def close(self) -> None:  # noqa: B027 - a runner may have nothing to end
        """End every process that it started."""


def environment_of(settings: Settings) -> Environment:
    """Where and within which limits the settings let processes run."""
    return Environment(
        run_dir=(settings.run_dir or default_run_dir(settings)).absolute(),
        nproc=None if settings.nproc == "auto" else settings.nproc,
        nnodes=settings.nnodes,
        seed=settings.seed,
        numerics=settings.numerics,
        limits=settings.limits,
    )
