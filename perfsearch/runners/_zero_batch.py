"""The arithmetic of batches: micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perfsearch.core.knob import Configuration
from perfsearch.core.narrow import SEARCH, KnobError
from perfsearch.core.space import Constraint

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
            return self.share // int(configuration["micro_batch"] or 1)
        return int(configuration["gradient_accumulation"] or 1)

    def may_train(self, global_batch: int) -> bool:
        """Whether a configuration may have this global batch."""
        if self.rule == "fixed":
            return global_batch == self.global_batch
        return self.low <= global_batch and (self.high is None or global_batch <= self.high)

    def global_batch_of(self, configuration: Configuration) -> int:
        """Samples of a step over all ranks."""
        micro = int(configuration["micro_batch"] or 1)
        return micro * self.accumulation_of(configuration) * self.world_size

    def constraint(self, pinned: Mapping[str, Any]) -> Constraint:
        """The rule that every configuration keeps."""

        def holds(configuration: Configuration) -> bool:
            whole = {**pinned, **configuration}
            if self.rule == "fixed":
                return self.share % int(whole["micro_batch"]) == 0
            return self.may_train(self.global_batch_of(whole))

        if self.rule == "fixed":
            text = f"micro_batch does not divide the {self.share} samples of a rank"
        else:
            text = f"the global batch is not between {self.low} and {self.high or 'any'}"
        return Constraint("global_batch", holds, text)


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
    for name in ("micro_batch", "gradient_accumulation"):
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
    wanted = settled.get("gradient_accumulation", SEARCH)
    if wanted in (SEARCH, None):
        return settled
    del settled["gradient_accumulation"]
    follows = sorted(batch.share // value for value in _numbers(wanted))
    if not follows:
        raise KnobError(
            f"runner.knobs.gradient_accumulation={wanted}: with batch=fixed it follows from "
            "micro_batch. Give a number or a list, or narrow micro_batch instead"
        )
    asked = settled.get("micro_batch", SEARCH)
    if asked not in (SEARCH, None) and sorted(_numbers(asked)) != follows:
        raise KnobError(
            f"runner.knobs.micro_batch={asked} and gradient_accumulation={wanted}: with "
            f"batch=fixed their product must be {batch.share}. Give one of them"
        )
    settled["micro_batch"] = follows[0] if len(follows) == 1 else follows
    return settled


def _numbers(setting: Any) -> list[Any]:
    """The values that a setting names, none for ``search``, a range or ``None``."""
    if setting is None or isinstance(setting, str | Mapping):
        return []
    return list(setting) if isinstance(setting, Sequence) else [setting]
