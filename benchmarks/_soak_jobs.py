"""The jobs whose searches are struck, each as the arguments of ``perfsearch``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _fault_replay import make_table
from _soak_faults import KINDS

_HERE = Path(__file__).parent
_COMPARED = (0, 4, 5)
"""Exit codes of a comparison that was made: faster, no difference shown, slower."""
_LONG_TRIALS = 400


@dataclass(frozen=True)
class Job:
    """One kind of command.

    Attributes:
        make: puts the user's files into a directory, and returns arguments.
        events: how many its journal has before the end, about.
        kinds: what may strike it.
        good: exit codes with which it is done.
        resumes: whether the same command goes on with what was broken off.
        share: how often it is drawn, beside the others.
        memory: whether the controller's is looked at.

    """

    make: Callable[[Path, random.Random], list[str]]
    events: int
    kinds: tuple[str, ...] = KINDS
    good: tuple[int, ...] = (0,)
    resumes: bool = True
    share: int = 3
    memory: bool = False


_ALL = ("budget.seconds=null", "confirm.seconds=null", "confirm.finalists=1")
_REAL = (
    *_ALL,
    "runner=ddp",
    "runner.device=cpu",
    "nproc=2",
    "strategy=random",
    "budget.trials=2",
    "sentinel_every=1",
    "confirm.max_repeats=2",
    "objective.min_gain=0",
    "limits.startup_s=240",
    "limits.trial_s=120",
    "limits.grace_s=5",
)


def _built_in(work: Path, draw: random.Random) -> list[str]:
    _user_files(work)
    knobs = "+runner.knobs={dataloader_workers: [0, 1], bucket_cap_mb: [1, 25]}"
    return [
        *_REAL,
        "workload=mlp",
        "workload.size=tiny",
        "numerics=altering",
        "~runner.knobs",
        knobs,
    ]


def _user_files(work: Path) -> None:
    """What the user has in the directory: some of it is what the script changes."""
    shutil.copy(_HERE / "_soak_script.py", work / "train.py")
    (work / "log.txt").write_text("of an earlier training\n")
    (work / "state.json").write_text("{}\n")
    (work / "old.txt").write_text("kept for years\n")
    (work / "kept").mkdir()
    (work / "kept" / "notes.txt").write_text("mine\n")


def _script(work: Path, draw: random.Random) -> list[str]:
    _user_files(work)
    knobs = "+runner.knobs={bucket_cap_mb: [1, 25], gradient_as_bucket_view: search}"
    command = f"workload.command=[train.py,--workers,'{draw.randrange(3)}']"
    return [*_REAL, "workload=script", command, "~runner.knobs", knobs]


def _compare(work: Path, draw: random.Random) -> list[str]:
    _user_files(work)
    start = "torchrun --nproc-per-node 2 train.py"
    options = ["--max-starts", "2", "--run-dir", "run"]
    return ["compare", start, f"{start} --workers {draw.randrange(3)}", *options]


def _replay(work: Path, draw: random.Random) -> list[str]:
    make_table(work / "table.csv", draw)
    strategy = draw.choice(("random", "bayes", "mcmc", "nevergrad"))
    return [
        *_ALL,
        "runner=replay",
        "runner.table=table.csv",
        "runner.baseline={bucket: 1, view: false, algorithm: ring}",
        "runner.real_time=1",  # else it is over before it is struck
        f"strategy={strategy}",
        "budget.trials=16",
        "sentinel_every=4",
        "confirm.max_repeats=3",
    ]


def _long_replay(work: Path, draw: random.Random) -> list[str]:
    """More trials than any search of a job has, for what a controller keeps of each.

    Each takes a while, so that the store has it before the next.
    """
    lines = ["bucket,chunk,status,samples_per_s,step_ms"]
    for bucket in range(1, 41):
        for chunk in range(1, 41):
            slow = 100 + abs(bucket - 17) + abs(chunk - 29)
            steps = " ".join(f"{slow * (1 + draw.uniform(-0.01, 0.01)):.4f}" for _ in range(5))
            lines.append(f"{bucket},{chunk},ok,{32e3 / slow:.3f},{steps}")
    (work / "table.csv").write_text("\n".join(lines) + "\n")
    return [
        *_ALL,
        "runner=replay",
        "runner.table=table.csv",
        "runner.baseline={bucket: 1, chunk: 1}",
        "runner.real_time=0.5",
        "strategy=random",
        f"budget.trials={_LONG_TRIALS}",
        "confirm.max_repeats=3",
    ]


JOBS = {
    "ddp": Job(_built_in, 28),
    "script": Job(_script, 26),
    "replay": Job(_replay, 130),
    "compare": Job(_compare, 14, good=_COMPARED, resumes=False, share=2),
    "long replay": Job(_long_replay, 1600, kinds=("clock", "store"), share=1, memory=True),
}
