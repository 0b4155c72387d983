"""What the controller asks of the ranks of a DeepSpeed job, and where they leave their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfsearch.core.files import write_text

VARIABLE = "PERFSEARCH_DEEPSPEED"
"""Environment variable with the path of the request."""


@dataclass(frozen=True)
class Request:
    """One trial.

    Attributes:
        log_directory: where ranks log and answer.
        controller: its process, and when that was started.
        config: path of the trial's configuration, to be put in the place of one that the script
            names itself; empty where the command names it.
        scored_steps: smallest and largest number of scored steps.
        scored_seconds: wall time that they should cover.
        look_steps: as many steps are made at least where the job has them, in search of slow ones
            that recur seldom.
        look_seconds: unless they take longer than this.
        limit_s: seconds that the trial's steps may take.
        profile_steps: first and last scored step, where the user sets them.
        stop_above_s: end early once a step takes longer.
        survive: whether a checkpoint is saved, too.
        seed: of the search; the ranks' generators are seeded before the script begins.
        undo: where it is recorded what the job does to files; empty: nowhere.
        directory: of the group, as ``write`` is told it: each rank notes there that it will say
            where it stands when it is asked.

    """

    log_directory: str
    controller: tuple[int, float]
    config: str = ""
    scored_steps: tuple[int, int] = (8, 60)
    scored_seconds: float = 1.0
    look_steps: int = 0
    look_seconds: float = math.inf
    limit_s: float = math.inf
    profile_steps: tuple[int, int] | None = None
    stop_above_s: float | None = None
    survive: bool = False
    seed: int = 0
    undo: str = ""
    directory: str = ""

    @property
    def path(self) -> Path:
        """Where it is written."""
        return Path(self.log_directory) / "request.json"

    def write(self, directory: Path) -> None:
        """Leave it for the ranks of the group whose directory this is."""
        self.path.write_text(json.dumps({**asdict(self), "directory": str(directory)}))

    @classmethod
    def read(cls, path: str) -> Request:
        """As a rank finds it."""
        record: dict[str, Any] = json.loads(Path(path).read_text())
        low, high = record["scored_steps"]
        steps = record["profile_steps"]
        first_and_last = None if steps is None else (int(steps[0]), int(steps[1]))
        pid, started = record["controller"]
        record["controller"] = (int(pid), float(started))
        return cls(**{**record, "scored_steps": (low, high), "profile_steps": first_and_last})


def result_file(directory: str | Path, rank: int) -> Path:
    """Where a rank leaves what it measured."""
    return Path(directory) / f"rank{rank}.result.json"


def so_far_file(directory: str | Path, rank: int) -> Path:
    """Where a rank keeps what it has measured, while it goes on to measure more."""
    return Path(directory) / f"rank{rank}.so_far.json"


def ended_file(directory: str | Path, rank: int) -> Path:
    """Where a rank whose script ended first says how far it came."""
    return Path(directory) / f"rank{rank}.ended.json"


def ended(directory: str | Path, rank: int) -> dict[str, Any] | None:
    """How far a rank came whose script ended first, ``None`` where that is not known."""
    file = ended_file(directory, rank)
    return json.loads(file.read_text()) if file.exists() else None


def torch_logs_file(directory: str | Path) -> Path:
    """Where a rank that torch's launcher started says in which directory that one logs."""
    return Path(directory) / "torch_logs.json"


def write_whole(path: Path, record: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    write_text(path, json.dumps(record))
