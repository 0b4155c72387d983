"""The job of `zero_gpu.py` and one visit of a configuration."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from _store import Store

from perfsearch.config.schema import Settings, validate
from perfsearch.core.space import key_of
from perfsearch.core.trial import Measurement, Purpose, Trial
from perfsearch.runners.base import Plan
from perfsearch.runners.zero.runner import Zero

LARGEST_PER_GPU = 64
LLAMA = "llama"
"""The second model."""
COMMON = {"optimizer_implementation": "fused", "gradient_as_bucket_view": True}
"""What a hand-tuned job has already; the same in every configuration compared."""


class NoTracker:
    """No MLflow here."""

    def trial(self, trial: Trial) -> None:
        """Take no note."""


class Bench:
    """Where, how large, and until when.

    Args:
        arguments: of the command line.

    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.ranks: int = arguments.ranks
        self.device: str = arguments.device
        self.size: str = arguments.size
        self.wheels: Path | None = arguments.wheels
        self.tiny: bool = arguments.size == "tiny"
        self.per_gpu: int = arguments.per_gpu
        self.store = Store(arguments.store)
        self.deadline = time.monotonic() + arguments.until_s

    def in_time(self) -> bool:
        """Whether another configuration may start."""
        return time.monotonic() < self.deadline

    def workload(self, size: str) -> dict[str, Any]:
        """GPT-2 of a size, or the second model."""
        if size == LLAMA:
            factory = "build_tiny" if self.tiny else "build"
            return {"name": "custom", "factory": f"benchmarks._llama:{factory}"}
        return {"name": "gpt", "size": size}

    def settings(self, rule: str, size: str, per_gpu: int, **changes: Any) -> Settings:
        """What a user would write for this."""
        knobs = {
            "zero_stage": "search",
            "micro_batch": "search",
            "activation_checkpointing": [0, 1],
            "gradient_accumulation": 1 if rule == "free" else "search",
            **COMMON,
        }
        runner: dict[str, Any] = {"name": "zero", "device": self.device, "knobs": knobs}
        if rule == "free":
            runner["max_train_batch_size"] = LARGEST_PER_GPU * self.ranks
        plain = {
            "runner": runner,
            "strategy": {"name": "fast"},
            "workload": {**self.workload(size), "global_batch": per_gpu * self.ranks},
            "batch": rule,
            "nproc": self.ranks,
            "budget": {"trials": 13, "seconds": 90.0},
            "sentinel_every": 0,
            "limits": {"startup_s": 240},
            **changes,
        }
        return validate(plain)

    @contextmanager
    def runner(self, settings: Settings) -> Iterator[Zero]:
        """A runner of its own, with processes of its own."""
        with tempfile.TemporaryDirectory() as directory:
            made = Zero.from_settings(replace(settings, run_dir=Path(directory)))
            made.open(Path(directory))
            try:
                yield made
            finally:
                made.close()


def visit(
    runner: Zero,
    number: int,
    configuration: dict[str, Any],
    logs: Path,
    scored_steps: tuple[int, int] = (8, 60),
) -> dict[str, Any]:
    """Measure one configuration warm; what to keep of it."""
    begin = time.monotonic()
    plan = Plan(
        number, Purpose.CONFIRM, time_limit_s=180.0, log_directory=logs / str(number),
        scored_steps=scored_steps,
    )  # fmt: skip
    runner._survived.add(key_of(configuration))  # a grid makes no checkpoints
    outcome = runner.measure(configuration, plan)
    kept: dict[str, Any] = {
        "configuration": configuration,
        "status": str(outcome.status),
        "reason": outcome.reason,
        "seconds": round(time.monotonic() - begin, 2),
    }
    measured = outcome.measurement
    if measured is not None:
        kept.update(_numbers(measured))
    print(f"  {configuration} {kept['status']} {kept.get('samples_per_s', '')} "
          f"({kept['seconds']} s)", flush=True)  # fmt: skip
    return kept


def _numbers(measured: Measurement) -> dict[str, Any]:
    evidence = measured.bottleneck_evidence
    return {
        "samples_per_s": round(measured.samples_per_s, 3),
        "samples_per_step": measured.samples_per_step,
        "step_ms": [round(s * 1e3, 3) for s in measured.step_seconds],
        "peak_allocated_gib": measured.peak_allocated_gib,
        "peak_reserved_gib": measured.peak_reserved_gib,
        "first_losses": measured.first_losses,
        "retries": evidence.get("allocator_retries"),
        "evidence": {k: v for k, v in evidence.items() if "gib" in k},
    }
