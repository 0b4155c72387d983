"""Trials to show, and a store to look them up in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.journal import JOURNAL, Journal
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.tracking.mlflow import Tracker

KNOBS = (
    Knob("bucket_cap_mb", Kind.INTEGER, 25, low=1, high=256),
    Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring")),
)


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


class Search:
    """A search: its journal, which a tracker follows, written as the pipeline does.

    One whose journal is there already goes on with it.
    """

    def __init__(
        self,
        store: LocalStore,
        search_id: str = "s1",
        parameters: dict[str, Any] | None = None,
        knobs: Sequence[Knob] = KNOBS,
        **changes: Any,
    ) -> None:
        self.tracker = store.tracker(search_id, **changes)
        self.run_dir = self.tracker.run_dir
        self.journal = journal_in(self.run_dir, search_id)
        self.tracker.open(self.journal)
        listed = [[k.name, str(k.kind), list(k.values), k.low, k.high, k.log] for k in knobs]
        self.journal.append(
            "opened",
            unix_s=time.time(),
            definition={"knobs": listed, "baseline": {k.name: k.default for k in knobs}},
            parameters=parameters or {},
            tracking=dict(self.tracker.destination),
        )

    def trials(self, *trials: Trial) -> None:
        for one in trials:
            self.journal.append("finished", unix_s=time.time(), trial=one.to_json())

    def simulated(self, name: str, *points: tuple[int, float]) -> None:
        self.journal.append("simulated", unix_s=time.time(), series={name: points})

    def summarise(
        self,
        numbers: dict[str, float],
        tags: dict[str, str] | None = None,
        note: str = "",
        files: Sequence[str] = (),
    ) -> None:
        said = {"numbers": numbers, "tags": tags or {}, "note": note, "files": list(files)}
        self.journal.append("summarised", unix_s=time.time(), **said)

    def end(self, status: str = "FINISHED", timeout_s: float = 60.0) -> bool:
        """Close the view; whether it is complete."""
        self.tracker.close(status, timeout_s)
        if status == "FINISHED":
            self.journal.append("ended", unix_s=time.time(), exit_code=0, reason="done")
        self.journal.close()
        return self.tracker.complete


def journal_in(run_dir: Path, search_id: str) -> Journal:
    """The journal of a run directory, a new one where there is none."""
    path = run_dir / JOURNAL
    return Journal.reopen(path) if path.exists() else Journal(path, {"search_id": search_id})


class LocalStore:
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
        by_id = {f"t{int(run.data.tags['perfsearch.trial']):04d}": run for run in found}
        assert len(by_id) == len(found), "a trial has two runs"
        return by_id

    def search(self) -> Any:
        (run,) = self.runs("search")
        return run
