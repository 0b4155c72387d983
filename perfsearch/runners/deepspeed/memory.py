"""What a DeepSpeed configuration needs of a GPU: its formulas for what rests there, and trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfsearch.core.hints import Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import STAGE

_GIB = 2**30
_ADAM = ("adam", "lamb")
_MICRO = MICRO_BATCH.name


@dataclass(frozen=True)
class Rest:
    """Bytes a parameter of what a rank holds between steps (ZeRO, table 1, and DeepSpeed's code).

    Attributes:
        parameters: of the whole model.
        trainable: those that have gradients.
        half: whether parameters and gradients take two bytes and the optimizer keeps a copy.
        states: bytes a parameter of the optimizer's state; 0 where the optimizer is not known.

    """

    parameters: float
    trainable: float
    half: bool
    states: int

    def gib(self, stage: int, ranks: int) -> float:
        """At rest on one rank, in GiB; the ranks' common part in full below its stage."""
        size = 2 if self.half else 4
        weights = size * self.parameters / (ranks if stage >= 3 else 1)
        gradients = size * self.trainable / (ranks if stage >= 2 else 1)
        kept = (self.states + (4 if self.half else 0)) * self.trainable
        return (weights + gradients + kept / (ranks if stage >= 1 else 1)) / _GIB


class Memory:
    """Predicts peaks from what trials showed; refuses what surely does not fit.

    Args:
        file: the user's configuration.
        ranks: data-parallel ones.
        pinned: knobs that every configuration shares.
        capacity_gib: of a GPU; ``None`` on a CPU, where nothing is predicted.
        headroom: share of it to leave unused.
        parameters: of the model, where they are known before a trial.

    """

    def __init__(
        self,
        file: Mapping[str, Any],
        ranks: int,
        pinned: Mapping[str, Value],
        capacity_gib: float | None,
        headroom: float,
        parameters: int | None,
    ) -> None:
        self.capacity_gib = capacity_gib
        self.headroom = headroom
        self._ranks = ranks
        self._pinned = dict(pinned)
        self._stated = parameters
        self._half = any(
            isinstance(file.get(name), Mapping) and file[name].get("enabled") is True
            for name in ("fp16", "bf16", "bfloat16")
        )
        kind = (file.get("optimizer") or {}).get("type", "")
        self._states = 8 if any(n in str(kind).lower() for n in _ADAM) else 0

    @property
    def limit_gib(self) -> float | None:
        """What a configuration may use."""
        return None if self.capacity_gib is None else self.capacity_gib * (1 - self.headroom)

    def _rest(self, trials: Sequence[Trial]) -> Rest | None:
        for trial in trials:
            seen = trial.measurement.bottleneck_evidence if trial.measurement else {}
            if "parameters" in seen:
                trainable = seen["trainable_parameters"]
                return Rest(seen["parameters"], trainable, self._half, self._states)
        if self._stated is None:
            return None
        return Rest(self._stated, self._stated, self._half, self._states)

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """The peak: what rests, and a line in the micro-batch through the peaks seen."""
        rest = self._rest(trials)
        whole = {**self._pinned, **configuration}
        if self.capacity_gib is None or rest is None or _offloads(whole):
            return Prediction()
        points = []
        for trial in trials:
            seen = {**self._pinned, **trial.configuration}
            peak = trial.measurement.peak_allocated_gib if trial.measurement else None
            if peak is not None and trial.purpose is not Purpose.CONFIRM and not _offloads(seen):
                above = peak - rest.gib(STAGE.number(seen), self._ranks)
                points.append((MICRO_BATCH.number(seen), above))
        at_rest = rest.gib(STAGE.number(whole), self._ranks)
        if not points:
            return Prediction()
        micro, above = np.array(points, dtype=float).T
        if len(set(micro)) > 1:
            slope, base = np.polyfit(micro, above, 1)
        else:
            slope, base = float(np.mean(above)) / micro[0], 0.0
        return Prediction(peak_gib=float(at_rest + base + slope * MICRO_BATCH.number(whole)))

    def refusal(self, configuration: Configuration, trials: Sequence[Trial]) -> str | None:
        """Why a configuration is not worth a trial; ``None`` where it is."""
        whole = {**self._pinned, **configuration}
        for trial in trials:
            seen = {**self._pinned, **trial.configuration}
            if trial.status is not Status.OOM or seen[_MICRO] == whole[_MICRO]:
                continue
            alike = all(seen[k] == whole[k] for k in whole if k not in _BATCH)
            if alike and MICRO_BATCH.number(seen) < MICRO_BATCH.number(whole):
                return f"micro_batch={seen[_MICRO]} ran out of memory with all else equal"
        rest = self._rest(trials)
        if self.capacity_gib is None or rest is None or _offloads(whole):
            return None
        at_rest = rest.gib(STAGE.number(whole), self._ranks)
        if at_rest > self.capacity_gib:
            return (
                f"zero_stage={STAGE.of(whole)}: {at_rest:.1f} GiB rest on each GPU, which has "
                f"{self.capacity_gib:.1f}"
            )
        return None

    def lacks_headroom(self, measured: Measurement) -> str:
        """Why a configuration that ran leaves too little of a GPU; empty where it does not."""
        capacity, limit = self.capacity_gib, self.limit_gib
        peak = measured.peak_allocated_gib
        if capacity is None or limit is None:
            return ""
        if peak is not None and peak > limit:
            return (
                f"it runs, but {peak:.1f} of {capacity:.1f} GiB leave less unused than "
                f"runner.memory_headroom={self.headroom:g} asks for"
            )
        retries = measured.bottleneck_evidence.get("allocator_retries", 0.0)
        if retries > 0 and self.headroom > 0:
            return (
                f"it runs, but the allocator had to give memory back and try again {retries:g} "
                f"times, so runner.memory_headroom={self.headroom:g} is not left"
            )
        return ""


_BATCH = (_MICRO, ACCUMULATION.name)


def _offloads(values: Mapping[str, Value]) -> bool:
    return any(
        values.get(n) not in (None, "none", False) for n in ("offload_optimizer", "offload_param")
    )
