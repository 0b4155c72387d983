"""What one trial was, how it ended, and what was measured."""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, cast

from perfsearch.core.knob import Value
from perfsearch.core.steps import Reading, Statistic, read_window, step_time_s


class Purpose(StrEnum):
    """Why a trial was run."""

    BASELINE = "baseline"
    SENTINEL = "sentinel"
    SEARCH = "search"
    REPEAT = "repeat"
    """One of the best, once more, to choose which of them is confirmed."""
    CONFIRM = "confirm"
    BESIDE = "beside"
    """The baseline, to see how much trials at the same time disturb each other."""

    @property
    def is_of_search(self) -> bool:
        """Whether it comes before the confirmation, so that the strategy is told of it."""
        return self not in (Purpose.REPEAT, Purpose.CONFIRM, Purpose.BESIDE)


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    INVALID = "invalid"
    CRASH = "crash"
    KILLED = "killed"
    DIVERGED = "diverged"
    NOT_APPLIED = "not_applied"
    PRUNED = "pruned"
    INFRASTRUCTURE = "infrastructure"
    INTERRUPTED = "interrupted"

    @property
    def is_failure(self) -> bool:
        """Whether the configuration itself is to blame, so that it must not be proposed again."""
        return not (self in (Status.OK, Status.PRUNED, Status.INTERRUPTED) or self.is_from_outside)

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong, whoever is to blame."""
        return self.is_failure or self.is_from_outside

    @property
    def is_from_outside(self) -> bool:
        """Whether the configuration had no part in its failure: retried, never scored."""
        return self in (Status.INFRASTRUCTURE, Status.KILLED)


@dataclass
class Measurement:
    """What the ranks saw of one configuration. Units stand in the names.

    Attributes:
        step_seconds: one entry a step of the window, in order, the slowest rank's.
        samples_per_step: the global batch; ``None``: samples cannot be counted, and steps are.
        statistic: what of these steps is the step time, and so all that follows from it.
        tokens_per_step: tokens in the global batch, where there are tokens.
        flops_per_step: model floating-point operations of a step over all ranks, where counted.
        world_size: number of ranks.
        discarded_steps: steps run before timing was steady.
        discarded_seconds: wall time of those steps.
        rewrap_seconds: time to put the configuration into force, steps apart.
        compile_seconds: time spent in torch.compile, apart from everything else.
        detail_seconds: wall time of the profile after the scored steps.
        phases_ms: mean time a step by phase, the slowest rank's.
        peak_allocated_gib: largest over ranks; on a CPU the peak resident set.
        peak_reserved_gib: largest over ranks, ``None`` without a caching allocator.
        first_losses: mean over ranks of the losses of the first steps after the common start.
        in_force: what was really in effect, as read back from the libraries.
        environment: clocks, throttle reasons and foreign processes seen before scoring; devices,
            their peak, each rank's place; what slow steps are; what the diagnosis found.
        system: system metrics over the window, by MLflow key without the ``system/`` prefix.
        bottleneck_evidence: numbers for the diagnosis (shares of the step, by phase).

    """

    step_seconds: list[float]
    samples_per_step: int | None
    statistic: str = Statistic.RATE
    tokens_per_step: int | None = None
    flops_per_step: float | None = None
    world_size: int = 1
    discarded_steps: int = 0
    discarded_seconds: float = 0.0
    rewrap_seconds: float = 0.0
    compile_seconds: float = 0.0
    detail_seconds: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=dict)
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    first_losses: list[float] = field(default_factory=list)
    in_force: dict[str, Value] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    system: dict[str, float] = field(default_factory=dict)
    bottleneck_evidence: dict[str, float] = field(default_factory=dict)

    def not_finite(self) -> list[str]:
        """Names of the fields that hold a NaN or an infinity."""
        return [name for name, value in asdict(self).items() if not _finite(value)]

    @property
    def reading(self) -> Reading:
        """The rate of the window, its error, and the slow steps in it."""
        return read_window(self.step_seconds)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, by the statistic."""
        return step_time_s(self.step_seconds, self.statistic)

    @property
    def samples_per_s(self) -> float | None:
        """Global batch over the step time."""
        return None if self.samples_per_step is None else self.samples_per_step / self.step_time_s

    @property
    def steps_per_s(self) -> float:
        """Steps over the step time."""
        return 1 / self.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the global batch over the step time."""
        return None if self.tokens_per_step is None else self.tokens_per_step / self.step_time_s


@dataclass
class Outcome:
    """What came of measuring a configuration: a measurement, or a typed failure.

    Attributes:
        status: how it ended.
        measurement: of a trial that ran to its end.
        reason: why the status is not ``ok``, in one line.
        log_path: the log of the first failing rank, or of rank 0.
        fresh_process: whether processes were started for it.
        started_s: seconds that this took where it was done before the trial was asked for.
        extra: further plain values for the trial; ``info`` is what ranks said of the job.

    """

    status: Status
    measurement: Measurement | None = None
    reason: str = ""
    log_path: str = ""
    fresh_process: bool = False
    started_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trial:
    """One configuration that was tried.

    Attributes:
        number: position in the search; 0 is the baseline.
        configuration: the knobs' values.
        purpose: why it was run.
        status: how it ended.
        measurement: what was measured; for failures what there is, often ``None``.
        cost: what strategies minimise, positive (seconds a sample for throughput, seconds a step
            for latency); ``None`` without a valid measurement. For ``pruned`` a lower bound.
        cost_error: standard error of ``log(cost)`` from the step times, where it is known.
        objective: the objective in its own unit and direction, for people.
        reason: one line saying why it failed.
        log_path: the full log of the first failing rank, or of rank 0.
        seconds: wall time from its start to its end, everything included.
        overhead_seconds: ``seconds`` less scored and discarded steps.
        fresh_process: whether processes had to be started for it.
        lane: which share of the devices it ran on, where several trials ran at a time.

    """

    number: int
    configuration: dict[str, Value]
    purpose: Purpose
    status: Status
    measurement: Measurement | None = None
    cost: float | None = None
    cost_error: float | None = None
    objective: float | None = None
    reason: str = ""
    log_path: str = ""
    seconds: float = 0.0
    overhead_seconds: float = 0.0
    fresh_process: bool = False
    lane: int = 0

    def __post_init__(self) -> None:
        self.reason = in_one_line(self.reason)

    def pack(self) -> None:
        """Have its measurement take a third of its memory: numbers side by side, lists and groups
        compressed, and names and short texts in common with other trials. It reads as before, and
        is not to be changed any more.
        """
        found = self.measurement
        if found is None:
            return
        for name in _BY_NAME:
            values = getattr(found, name)
            if isinstance(values, dict):
                setattr(found, name, _PackedMapping(values))
        if isinstance(found.environment, dict):
            found.environment = cast(dict[str, Any], _PackedTree(found.environment))
        if isinstance(found.step_seconds, list):
            found.step_seconds = cast(list[float], _PackedSteps("d", found.step_seconds))

    def to_json(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trial:
        """Rebuild a trial from ``to_json``; unknown fields of newer versions are left out.

        Raises:
            KeyError, ValueError: a field is missing or has an unknown value.

        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in record.items() if k in known}
        if values["status"] not in list(Status):
            raise ValueError(f"status={values['status']}: allowed: {', '.join(Status)}")
        values["purpose"] = Purpose(values["purpose"])
        values["status"] = Status(values["status"])
        values["configuration"] = dict(values["configuration"])
        if values.get("measurement") is not None:
            names = {f.name for f in fields(Measurement)}
            raw = {k: v for k, v in values["measurement"].items() if k in names}
            if not all(s > 0 and math.isfinite(s) for s in raw["step_seconds"]):
                raise ValueError(f"step_seconds={raw['step_seconds']}: allowed: positive numbers")
            # written before there was a choice, when it was the median
            values["measurement"] = Measurement(**{"statistic": Statistic.MEDIAN, **raw})
        return cls(**values)


_BY_NAME = ("phases_ms", "in_force", "system", "bottleneck_evidence")

_LONGEST_SHARED = 80


class _PackedSteps(array):  # type: ignore[type-arg]
    """Numbers that are equal to the list of them, and become it where they are copied."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, _PackedSteps) else other)

    def __deepcopy__(self, memo: object) -> list[float]:  # type: ignore[override]
        return list(self)

    __hash__ = None  # type: ignore[assignment]


class _PackedMapping(Mapping[str, Any]):
    """Values by name, the names in common with all that have the same; becomes a dict as well."""

    __slots__ = ("_places", "_values")
    _known: ClassVar[dict[tuple[str, ...], dict[str, int]]] = {}

    def __init__(self, values: Mapping[str, Any]) -> None:
        names = tuple(values)
        places = self._known.get(names)
        if places is None:
            places = self._known[names] = {sys.intern(str(n)): i for i, n in enumerate(names)}
        self._places = places
        numbers = all(type(value) is float for value in values.values())
        self._values: array[float] | tuple[Any, ...] = (
            array("d", values.values()) if numbers else tuple(map(_shared, values.values()))
        )

    def __getitem__(self, name: str) -> Any:
        return self._values[self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))


class _PackedTree(_PackedMapping):
    """The same where lists and groups are among the values: these are compressed."""

    __slots__ = ()

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: _compressed(value) for name, value in values.items()})

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return json.loads(zlib.decompress(value)) if isinstance(value, bytes) else value


def _compressed(value: Any) -> Any:
    return zlib.compress(json.dumps(value).encode()) if isinstance(value, dict | list) else value


def _shared(value: Any) -> Any:
    return sys.intern(value) if type(value) is str and len(value) <= _LONGEST_SHARED else value


def in_one_line(text: str) -> str:
    """``text`` in one line, with what no terminal or file should meet (control characters, halves
    of surrogate pairs) written as escapes.
    """
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(v) for v in value)
    return True


DRAWS_IN_FORWARD = "draws_in_forward"
"""In a measurement's ``environment``: the forward pass draws random numbers, as dropout does."""

WITHOUT_LOADER = "without_loader"
"""In a measurement's ``environment``: no batch of a ``DataLoader`` was seen in the scored steps, so
that ``forward`` begins where the step before ended, with the script's own work."""

PERTURBED = "perturbed"
"""In a measurement's ``environment``: weights were changed after the first step, by as much as
rounding does."""

PARAMETERS = "trained_parameters"
"""In a measurement's ``environment``: numbers that the optimizers train on rank 0."""

_RESOLUTION = {"bfloat16": 2**-7, "float16": 2**-10}
"""From one number to the next that a half-precision type has, relative to them."""


def loss_resolution(dtype: str) -> float:
    """How far apart losses of a type may be, relative to their size, though nothing differs.

    Each micro-batch's loss is rounded to the type, by half a step up or down; micro-batches of
    another size have other losses, which are rounded elsewhere.

    Args:
        dtype: torch's name of it, such as ``bfloat16``; 0 for one that is not known to be coarse.

    """
    return _RESOLUTION.get(dtype, 0.0)
