"""What the runner that searches knobs of these names would tell a strategy about them.

A table of measurements has no runner any more, but its knobs have the names of one, so what that
runner knows beforehand (what to try first, which knobs matter most, what fits) holds for them too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perfsearch.core.hints import Hints, Prediction
from perfsearch.core.knob import Configuration, Knob, Value
from perfsearch.core.trial import Trial
from perfsearch.metrics.memory_facts import MemoryFacts
from perfsearch.runners import _ddp_knobs, _ddp_starts, _deepspeed_knobs, _zero_knobs
from perfsearch.runners._zero_batch import Batch
from perfsearch.runners._zero_memory import HEADROOM, Memory

_ORDERS: Mapping[str, tuple[str, ...]] = {
    "ddp": _ddp_knobs.EFFECT_ORDER,
    "zero": _zero_knobs.EFFECT_ORDER,
    "deepspeed": _deepspeed_knobs.EFFECT_ORDER,
}
"""Runners by name, with their knobs in the order of expected effect; the first of equals wins."""


def owner(names: Sequence[str]) -> str | None:
    """The runner that knows most of the knobs, at least two and more than half of them."""
    known = {runner: sum(n in order for n in names) for runner, order in _ORDERS.items()}
    runner = max(known, key=lambda name: known[name])
    return runner if known[runner] >= 2 and 2 * known[runner] > len(names) else None


def hints(
    knobs: Mapping[str, Knob],
    baseline: Mapping[str, Value],
    memory: Memory | None,
    trials: Sequence[Trial],
) -> Hints:
    """Hints for knobs of known names.

    Args:
        knobs: that are searched, by name.
        baseline: trial 0.
        memory: predicts peaks; ``None`` where the job's tensors are not known.
        trials: so far; predictions use them, also those that are added later.

    """
    runner = owner(list(knobs))
    order = _ORDERS.get(runner or "", ())
    ordered = {name for name, knob in knobs.items() if knob.is_ordered}
    found = Hints(
        baseline=dict(baseline),
        effect_order=tuple(name for name in order if name in knobs),
        starts=tuple(_ddp_starts.starts(knobs, baseline)) if runner == "ddp" else (),
        monotonic={"micro_batch": 1} if "micro_batch" in ordered else {},
        stage_knob="zero_stage" if "zero_stage" in knobs else None,
    )
    if memory is None:
        return found

    def predict(configuration: Configuration) -> Prediction:
        return memory.predict(configuration, trials)

    return replace(found, memory_limit_gib=memory.limit_gib, predict=predict)


def memory_of(
    facts: Path,
    knobs: Mapping[str, Knob],
    global_batch: int | None,
    world_size: int,
    capacity_gib: float | None,
) -> Memory | None:
    """The memory model of a table of ``runner=zero``; ``None`` where its knobs do not allow one.

    Args:
        facts: ``model_facts.json`` of a search.
        knobs: that are searched, by name.
        global_batch: of the baseline.
        world_size: ranks.
        capacity_gib: of a device.

    Raises:
        ValueError: the file cannot be read; the message names the key.

    """
    given = RecordedFacts(facts)
    if owner(list(knobs)) != "zero" or "micro_batch" not in knobs or global_batch is None:
        return None
    micro_batches = [int(v or 1) for v in knobs["micro_batch"].choices() or ()]
    free = "gradient_accumulation" in knobs
    if not free and any(global_batch % (m * world_size) for m in micro_batches):
        return None
    batch = Batch("free" if free else "fixed", global_batch, world_size, micro_batches[0])
    return Memory(
        given, batch, {}, capacity_gib, on_gpu=capacity_gib is not None, headroom=HEADROOM
    )


class RecordedFacts:
    """Facts of a job's tensors that an earlier search left, read at once."""

    error = ""

    def __init__(self, file: Path) -> None:
        try:
            self._facts = MemoryFacts.from_json(json.loads(file.read_text())["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"runner.model_facts={file}: it cannot be used ({error}). Name the "
                "model_facts.json that runner=zero left beside its journal, or null."
            ) from error

    def get(self) -> MemoryFacts | None:
        """The facts."""
        return self._facts
