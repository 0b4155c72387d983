"""Trials to show, and a store to look them up in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.tracking.mlflow import Tracker

KNOBS = ["bucket_cap_mb", "algorithm"]


def trial(number: int, status: Status = Status.OK, **changes: Any) -> Trial:
    """A trial with everything in it; one that failed has no measurement."""
    ok = status in (Status.OK, Status.PRUNED)
    values: dict[str, Any] = {
        "configuration": {"bucket_cap_mb": 25 + number, "algorithm": "Ring"},
        "purpose": Purpose.SEARCH if number else Purpose.BASELINE,
        "measurement": measurement(0.1 / (1 + number)) if ok else None,
        "cost": 1.0 / (1 + number) if ok else None,
        "objective": 320.0 * (1 + number) if status is Status.OK else None,
        "reason": "" if ok else f"it ended as {status}",
        "seconds": 2.0,
    }
    return Trial(number=number, status=status, **{**values, **changes})


def measurement(step_s: float = 0.1, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "step_seconds": [step_s] * 10,
        "samples_per_step": 32,
        "tokens_per_step": 320,
        "world_size": 2,
        "phases_ms": {"forward": step_s * 500},
        "peak_allocated_gib": 1.5,
        "first_losses": [3.0, 2.0],
        "system": {"node_0/cpu_utilization_percentage": 40.0},
    }
    return Measurement(**{**values, **changes})


def write_journal(run_dir: Path, trials: list[Trial], torn: str = "") -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"schema": 1}]
    for one in trials:
        lines += [
            {"event": "asked", "configuration": one.configuration},
            {"event": "finished", "trial": one.to_json()},
        ]
    numbered = [line if n == 0 else {"n": n, **line} for n, line in enumerate(lines)]
    text = "".join(json.dumps(line) + "\n" for line in numbered)
    (run_dir / "journal.jsonl").write_text(text + torn)


class Store:
    """A SQLite store in ``directory``, and what is in it."""

    def __init__(self, directory: Path, uri: str | None = None) -> None:
        self.directory = directory
        self.uri = uri or f"sqlite:///{directory / 'mlflow.db'}"

    def tracker(self, search_id: str = "s1", **changes: Any) -> Tracker:
        values = {"uri": self.uri, "experiment": "exp", "run_dir": self.directory / search_id}
        return Tracker(**{**values, **changes}, search_id=search_id)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def runs(self, role: str | None = None, **search: Any) -> list[Any]:
        experiment = self.client.get_experiment_by_name("exp")
        rule = f"tags.`perfsearch.role` = '{role}'" if role else ""
        return list(
            self.client.search_runs([experiment.experiment_id], rule, max_results=500, **search)
        )

    def trials(self) -> dict[str, Any]:
        found = self.runs("trial")
        by_name = {run.info.run_name: run for run in found}
        assert len(by_name) == len(found), "a trial has two runs"
        return by_name

    def search(self) -> Any:
        (run,) = self.runs("search")
        return run
