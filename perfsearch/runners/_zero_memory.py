"""What a runner knows of memory: predictions, refusals, headroom, and advice when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from perfsearch.core.hints import Prediction
from perfsearch.core.knob import Configuration, Value
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.metrics.memory_facts import Layout, MemoryFacts
from perfsearch.metrics.memory_model import Estimate, MemoryModel, Observation, Terms
from perfsearch.runners._zero_batch import Batch

HEADROOM = 0.05
"""Share of a device's memory to leave unused where nothing else is said."""


class Facts(Protocol):
    """Where facts of the job's tensors come from."""

    error: str

    def get(self) -> MemoryFacts | None:
        """The facts, waited for; ``None`` where there are none, and ``error`` says why."""


class Memory:
    """The memory model of one search.

    Args:
        facts: of the job's tensors.
        batch: the arithmetic of batches.
        pinned: knobs that every configuration shares.
        capacity_gib: of a device; ``None`` where it has no limit of its own.
        on_gpu: whether peaks are those of a device's allocator. On a CPU they are the process's,
            which teaches nothing about tensors.
        headroom: share of the capacity to leave unused.

    """

    def __init__(
        self,
        facts: Facts,
        batch: Batch,
        pinned: Mapping[str, Value],
        capacity_gib: float | None,
        on_gpu: bool,
        headroom: float,
    ) -> None:
        self.facts = facts
        self.capacity_gib = capacity_gib
        self.headroom = headroom
        self._batch = batch
        self._pinned = pinned
        self._on_gpu = on_gpu
        self._terms: Terms | None = None
        self._model: tuple[list[tuple[int, Status]], MemoryModel] | None = None

    @property
    def limit_gib(self) -> float | None:
        """What a configuration may use."""
        return None if self.capacity_gib is None else self.capacity_gib * (1 - self.headroom)

    def layout(self, configuration: Configuration, facts: MemoryFacts) -> Layout:
        """The configuration as the model sees it."""
        whole = {**self._pinned, **configuration}

        def number(name: str) -> int:
            return int(whole.get(name) or 0)

        stage, world = number("zero_stage"), self._batch.world_size
        precision = "none"
        if facts.cast_bytes is not None:
            by_policy = stage >= 2 and whole.get("mixed_precision") != "autocast"
            precision = "policy" if by_policy else "autocast"
        return Layout(
            stage=stage,
            world_size=world,
            micro_batch=number("micro_batch"),
            accumulation=self._batch.accumulation_of(whole),
            shard_group=(number("shard_group_size") or world) if stage >= 2 else 1,
            checkpoint_every=number("activation_checkpointing"),
            blocks_per_unit=(number("blocks_per_unit") or 1) if stage >= 2 else 1,
            reshard_group=number("reshard_group_size") if stage == 3 else 0,
            prefetch=number("forward_prefetch") if stage >= 2 else 0,
            sync_each=bool(whole.get("gradient_sync_each")) and stage >= 2,
            offload=bool(whole.get("cpu_offload")) and stage >= 2,
            precision=precision,
            bucket_view=bool(whole.get("gradient_as_bucket_view")) and stage < 2,
            fused=whole.get("optimizer_implementation") == "fused" or not self._on_gpu,
        )

    def model(self, trials: Sequence[Trial]) -> MemoryModel | None:
        """The model after ``trials``; ``None`` where the job's tensors are not known."""
        facts = self.facts.get()
        if facts is None:
            return None
        if self._terms is None:
            self._terms = Terms(facts)
        seen = [(t.number, t.status) for t in trials]
        if self._model is None or self._model[0] != seen:
            observed = [o for t in trials if (o := self._observation(t, facts)) is not None]
            self._model = seen, MemoryModel(self._terms, observed, self.capacity_gib)
        return self._model[1]

    def _observation(self, trial: Trial, facts: MemoryFacts) -> Observation | None:
        if trial.purpose is Purpose.CONFIRM or "micro_batch" not in {
            **self._pinned,
            **trial.configuration,
        }:
            return None  # a finalist's peak holds its checkpoint too
        layout = self.layout(trial.configuration, facts)
        measured = trial.measurement.peak_allocated_gib if trial.measurement else None
        if measured is not None:
            return Observation(layout, measured) if self._on_gpu else None
        return Observation(layout, None) if trial.status is Status.OOM else None

    def estimate(self, configuration: Configuration, trials: Sequence[Trial]) -> Estimate | None:
        """What to expect of a configuration, with its margin."""
        model, facts = self.model(trials), self.facts.get()
        if model is None or facts is None:
            return None
        return model.predict(self.layout(configuration, facts))

    def predict(self, configuration: Configuration, trials: Sequence[Trial]) -> Prediction:
        """The expected peak, for a strategy."""
        found = self.estimate(configuration, trials)
        return Prediction() if found is None else Prediction(peak_gib=found.peak_gib)

    def refusal(self, configuration: Configuration, trials: Sequence[Trial]) -> str | None:
        """Why a configuration is not worth a trial; ``None`` where it is."""
        model, facts = self.model(trials), self.facts.get()
        if model is None or facts is None:
            return None
        layout = self.layout(configuration, facts)
        for name in ("activation_checkpointing", "blocks_per_unit"):
            value = int({**self._pinned, **configuration}.get(name) or 0)
            if value > max(1, facts.blocks) or (value and not facts.blocks and name[0] == "a"):
                return f"{name}={value}: the model has {facts.blocks} blocks"
        return model.surely_too_large(layout) or None

    def lacks_headroom(self, measured: Measurement) -> str:
        """Why a configuration that ran leaves too little of a device; empty where it does not."""
        capacity, limit = self.capacity_gib, self.limit_gib
        if not self._on_gpu or capacity is None or limit is None:
            return ""
        peak = measured.peak_allocated_gib
        if peak is not None and peak > limit:
            return (
                f"it runs, but {peak:.1f} of {capacity:.1f} GiB leave {1 - peak / capacity:.1%} "
                f"unused where runner.memory_headroom={self.headroom:g} asks for "
                f"{self.headroom:.0%}"
            )
        retries = measured.bottleneck_evidence.get("allocator_retries", 0.0)
        if retries > 0 and self.headroom > 0:
            return (
                f"it runs, but the allocator had to give memory back and try again {retries:g} "
                f"times, so runner.memory_headroom={self.headroom:g} is not left"
            )
        return ""

    def advice(self, space: Space, trials: Sequence[Trial]) -> str:
        """What came closest to fitting, by how much it is too large, and what else there is.

        Empty where memory was not what was lacking: no trial ran out of it, and no configuration
        is refused for it.
        """
        points, model, facts = space.listed() or [], self.model(trials), self.facts.get()
        if model is None or facts is None:
            return ""
        layouts = (self.layout(point, facts) for point in points)
        ran_out = any(t.status is Status.OOM for t in trials)
        if not ran_out and not any(map(model.surely_too_large, layouts)):
            return ""
        estimates = [(p, e) for p in points if (e := self.estimate(p, trials)) is not None]
        if not estimates:
            return ""
        point, least = min(estimates, key=lambda pair: pair[1].peak_gib)
        whole = {**self._pinned, **point}
        named = ", ".join(f"{k}={v}" for k, v in point.items())
        text = f"closest: {named or 'the only configuration'}, about {least.peak_gib:.1f} GiB"
        if self.capacity_gib is not None:
            over = least.peak_gib - self.capacity_gib
            text += f", {over:.1f} GiB too much" if over > 0 else ", which should fit"
        return f"{text}; {self._beyond(whole, least.peak_gib, trials)}"

    def _beyond(
        self, closest: Mapping[str, Value], least_gib: float, trials: Sequence[Trial]
    ) -> str:
        """What a configuration outside of the search would need, the mildest that fits first."""
        facts = self.facts.get()
        steps: list[dict[str, Value]] = [
            {"zero_stage": 3, "activation_checkpointing": int(bool(facts and facts.blocks))},
            {"micro_batch": 1, "gradient_sync_each": True},
            {"cpu_offload": True} if self._on_gpu else {},
        ]
        changed = dict(closest)
        asked: dict[str, Value] = {}
        said = ""
        for step in steps:
            asked.update({k: v for k, v in step.items() if closest.get(k) != v})
            changed.update(step)
            found = self.estimate(changed, trials)
            if found is None or found.peak_gib >= least_gib:
                continue
            keys = " ".join(f"runner.knobs.{k}={v}" for k, v in asked.items())
            said = f"{keys} would need about {found.peak_gib:.1f} GiB"
            if self.limit_gib is None or found.peak_gib <= self.limit_gib:
                return f"next: {said}"
        if said:
            return f"even {said}: it takes more devices"
        return "no other setting of this runner should need less: it takes more devices"
