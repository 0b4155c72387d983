"""The arithmetic of batches: micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from perfsearch.core.knob import Configuration, Kind, Knob, Numerics, Part
from perfsearch.core.narrow import SEARCH, KnobError
from perfsearch.core.space import Constraint
from perfsearch.knobs.base import Job, Record, Use

LARGEST_MICRO_BATCH = 1024
_GROWTH = 32
"""With ``batch=free`` micro-batches go up to so many times what a rank trains today."""


@dataclass(frozen=True)
class Batch:
    """Which batches may be trained.

    Attributes:
        rule: ``fixed`` or ``free``.
        global_batch: of the baseline.
        world_size: data-parallel ranks.
        micro_batch: of the baseline.
        low: smallest global batch, where free.
        high: largest global batch, where free; ``None`` for no limit.

    """

    rule: Literal["fixed", "free"]
    global_batch: int
    world_size: int
    micro_batch: int
    low: int = 1
    high: int | None = None

    @property
    def share(self) -> int:
        """Samples that a rank trains in a step of the baseline."""
        return self.global_batch // self.world_size

    @property
    def accumulation(self) -> int:
        """Of the baseline."""
        return self.share // self.micro_batch

    @property
    def numerics(self) -> Numerics:
        """What another micro-batch or accumulation does to the computation."""
        return Numerics.ALTERING if self.rule == "free" else Numerics.REORDERED

    def micro_batches(self) -> tuple[int, ...]:
        """Every micro-batch that is possible, the baseline's among them."""
        if self.rule == "fixed":
            return tuple(divisors(self.share))
        most = min(LARGEST_MICRO_BATCH, _GROWTH * self.share)
        if self.high is not None:
            most = self.high // self.world_size
        return tuple(sorted({self.micro_batch, *(m for m in ladder(most))}))

    def accumulations(self) -> tuple[int, ...]:
        """Every accumulation that is possible where the batch is free."""
        return tuple(sorted({1, 2, 4, 8, self.accumulation}))

    def accumulation_of(self, configuration: Configuration) -> int:
        """Micro-batches in a step of a configuration, which must be possible."""
        if self.rule == "fixed":
            return self.share // int(MICRO_BATCH.of(configuration) or 1)
        return int(ACCUMULATION.of(configuration) or 1)

    def may_train(self, global_batch: int) -> bool:
        """Whether a configuration may have this global batch."""
        if self.rule == "fixed":
            return global_batch == self.global_batch
        return self.low <= global_batch and (self.high is None or global_batch <= self.high)

    def global_batch_of(self, configuration: Configuration) -> int:
        """Samples of a step over all ranks."""
        micro = int(MICRO_BATCH.of(configuration) or 1)
        return micro * self.accumulation_of(configuration) * self.world_size

    def constraint(self, pinned: Mapping[str, Any]) -> Constraint:
        """The rule that every configuration keeps."""

        def holds(configuration: Configuration) -> bool:
            whole = {**pinned, **configuration}
            if self.rule == "fixed":
                return self.share % int(MICRO_BATCH.of(whole)) == 0
            return self.may_train(self.global_batch_of(whole))

        if self.rule == "fixed":
            text = f"micro_batch does not divide the {self.share} samples of a rank"
        else:
            text = f"the global batch is not between {self.low} and {self.high or 'any'}"
        return Constraint("global_batch", holds, text)


@dataclass(frozen=True)
class BatchJob(Job):
    """A job whose batches are searched.

    Attributes:
        batch: which of them may be trained.

    """

    _: KW_ONLY
    batch: Batch
    use: Use = Use.ZERO


def _micro_batch(knob: Knob, job: Job) -> Knob:
    if not isinstance(job, BatchJob):
        return knob
    batch = job.batch
    return replace(knob, default=batch.micro_batch, values=batch.micro_batches(),
                   numerics=batch.numerics)  # fmt: skip


def _accumulation(knob: Knob, job: Job) -> Knob | str:
    if not isinstance(job, BatchJob):
        return knob
    batch = job.batch
    if batch.rule == "fixed":
        return f"with batch=fixed it follows from {MICRO_BATCH.name}"
    return replace(knob, default=batch.accumulation, values=batch.accumulations(),
                   numerics=batch.numerics)  # fmt: skip


MICRO_BATCH = Record(
    Knob(
        "micro_batch", Kind.ORDINAL, 1, values=(1,), unit="samples",
        help="samples of one forward pass of a rank",
        numerics=Numerics.REORDERED, shortens=(Part.COMPUTING, Part.COMMUNICATION, Part.LOADING),
        redraws=True,
    ),
    uses=frozenset({Use.ZERO, Use.SCRIPT}), effect=100, zero_effect=100, fit=_micro_batch,
)  # fmt: skip

ACCUMULATION = Record(
    Knob(
        "gradient_accumulation", Kind.ORDINAL, 1, values=(1,), unit="micro-batches",
        help="micro-batches of a step", numerics=Numerics.REORDERED, redraws=True,
    ),
    uses=frozenset({Use.ZERO, Use.SCRIPT}), zero_effect=85, fit=_accumulation,
)  # fmt: skip

RECORDS = (MICRO_BATCH, ACCUMULATION)


def checked(
    rule: Literal["fixed", "free"],
    global_batch: int,
    world_size: int,
    micro_batch: int | None,
    low: int,
    high: int | None,
) -> Batch:
    """The baseline's batch and the bounds of ``runner=zero``.

    Raises:
        ValueError: they are impossible; the message names the key.

    """
    share = global_batch // world_size
    micro = share if micro_batch is None else micro_batch
    if share % micro:
        raise ValueError(
            f"runner.micro_batch={micro}: each of {world_size} ranks trains {share} samples a step "
            f"(workload.global_batch={global_batch}), which it does not divide. Nearest "
            f"possible: {nearest_possible(micro, divisors(share))}"
        )
    if rule == "fixed" and (high is not None or low != 1):
        key = "max_train_batch_size" if high is not None else "min_train_batch_size"
        raise ValueError(
            f"runner.{key}={high if high is not None else low}: batch=fixed trains the global "
            f"batch {global_batch} always. Set batch=free to bound it"
        )
    if high is not None and high < low:
        raise ValueError(
            f"runner.max_train_batch_size={high}: below runner.min_train_batch_size={low}"
        )
    if high is not None and high < world_size:
        raise ValueError(
            f"runner.max_train_batch_size={high}: {world_size} ranks train at least {world_size}"
        )
    if rule == "free" and not low <= global_batch <= (high or global_batch):
        key = "min_train_batch_size" if global_batch < low else "max_train_batch_size"
        raise ValueError(
            f"runner.{key}={low if global_batch < low else high}: the job itself trains the global "
            f"batch {global_batch}, and a search starts from there. Let the bounds include it, or "
            "change workload.global_batch"
        )
    return Batch(rule, global_batch, world_size, micro, low, high)


def divisors(number: int) -> list[int]:
    """Every divisor, in order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, then four steps to each doubling, up to ``most``."""
    found = [v for v in (1, 2, 3) if v <= most]
    power = 4
    while power <= most:
        found += [v for v in (power + i * power // 4 for i in range(4)) if v <= most]
        power *= 2
    return found


def nearest_possible(value: int, possible: Sequence[int]) -> str:
    """The possible values on both sides of one that is not, in words."""
    below = max((p for p in possible if p < value), default=None)
    above = min((p for p in possible if p > value), default=None)
    return " or ".join(str(v) for v in (below, above) if v is not None)


def settle(batch: Batch, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``runner.knobs`` against the batch and derive what follows from it.

    With ``batch=fixed`` the accumulation follows from the micro-batch, so an accumulation that
    was asked for becomes a choice of micro-batches.

    Raises:
        KnobError: a micro-batch or accumulation that is impossible, with the nearest that is not.

    """
    settled = dict(knobs)
    for name in (MICRO_BATCH.name, ACCUMULATION.name):
        for value in _numbers(settled.get(name)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise KnobError(f"runner.knobs.{name}={value}: a whole number from 1 is needed")
            if batch.rule == "fixed" and batch.share % value:
                raise KnobError(
                    f"runner.knobs.{name}={value}: with batch=fixed each of {batch.world_size} "
                    f"ranks trains {batch.share} samples a step (global batch "
                    f"{batch.global_batch}), which {value} does not divide. Nearest possible: "
                    f"{nearest_possible(value, divisors(batch.share))}; or batch=free"
                )
    if batch.rule == "free":
        return settled
    wanted = settled.get(ACCUMULATION.name, SEARCH)
    if wanted in (SEARCH, None):
        return settled
    del settled[ACCUMULATION.name]
    follows = sorted(batch.share // value for value in _numbers(wanted))
    if not follows:
        raise KnobError(
            f"runner.knobs.gradient_accumulation={wanted}: with batch=fixed it follows from "
            "micro_batch. Give a number or a list, or narrow micro_batch instead"
        )
    asked = settled.get(MICRO_BATCH.name, SEARCH)
    if asked not in (SEARCH, None) and sorted(_numbers(asked)) != follows:
        raise KnobError(
            f"runner.knobs.micro_batch={asked} and gradient_accumulation={wanted}: with "
            f"batch=fixed their product must be {batch.share}. Give one of them"
        )
    settled[MICRO_BATCH.name] = follows[0] if len(follows) == 1 else follows
    return settled


def _numbers(setting: Any) -> list[Any]:
    """The values that a setting names, none for ``search``, a range or ``None``."""
    if setting is None or isinstance(setting, str | Mapping):
        return []
    return list(setting) if isinstance(setting, Sequence) else [setting]
