"""The command itself on a replay, killed again and again."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.journal import read

DRIVER = Path(__file__).parents[1] / "support" / "kill_command.py"
PHASES = ("before", "middle", "after")
KINDS = ("opened", "asked", "started", "finished", "told", "confirmed", "ended")


def make_directory(path: Path) -> Path:
    """48 configurations, some of which fail."""
    path.mkdir()
    lines = ["bucket,view,algorithm,depth,status,samples_per_s,step_ms"]
    choices = itertools.product((1, 4, 16, 64), ("false", "true"), ("ring", "tree"), (1, 2, 3))
    for place, (bucket, view, algorithm, depth) in enumerate(choices):
        slow = 90 - 7 * bucket.bit_length() - 5 * (view == "true") + 3 * depth
        steps = " ".join(f"{slow * (1 + 0.004 * ((place + i) % 5)):.3f}" for i in range(5))
        outcome = f"ok,{32e3 / slow:.3f},{steps}" if place % 6 != 4 else "oom,,"
        lines.append(f"{bucket},{view},{algorithm},{depth},{outcome}")
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    return path


def drive(directory: Path, strategy: str, *kills: str) -> list[int]:
    command = [sys.executable, str(DRIVER), str(directory), strategy, *kills]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=True)
    return [int(code) for code in done.stdout.split()]


def story(run_dir: Path) -> dict:
    """Trials, proposals in their order, and what was handed over; no wall times."""
    _, events = read(run_dir / "journal.jsonl")
    ends = {e.data["trial"]["number"]: e.data["trial"] for e in events if e.name == "finished"}
    keys = ("configuration", "purpose", "status", "cost")
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    return {
        "trials": [(n, [ends[n][k] for k in keys]) for n in sorted(ends)],
        "asked": [e.data["configuration"] for e in events if e.name == "asked"],
        "best": [summary[k] for k in ("trial", "knobs", "verdict", "speed_up")],
    }


@pytest.mark.slow
def test_a_command_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """optuna/optuna#3215, optuna/optuna#6283: 20 times SIGKILL, at every kind of event.

    The strategy's state is restored each time: every proposal is the undisturbed search's.
    """
    calm = make_directory(tmp_path / "calm")
    assert drive(calm, "bayes") == [0]
    names = [e.name for e in read(calm / "run" / "journal.jsonl")[1]]
    points = set()
    for kind in KINDS:
        places = [i + 1 for i, name in enumerate(names) if name == kind]
        chosen = places[:: max(1, len(places) // 3)][:3]
        points |= set(zip(chosen * 3, PHASES, strict=False))
    # Every resume adds an event, so later places still lie ahead.
    ordered = sorted(points, key=lambda point: (point[0], PHASES.index(point[1])))
    assert len(ordered) >= 20
    killed = make_directory(tmp_path / "killed")
    codes = drive(killed, "bayes", *[f"{place}:{phase}" for place, phase in ordered])
    assert codes.count(-signal.SIGKILL) >= 20
    assert set(codes) == {-signal.SIGKILL, 0}
    assert story(killed / "run") == story(calm / "run")
    output = (killed / "output.txt").read_text()
    assert "proposes otherwise" not in output
    assert "dropped a line that was torn" in output.replace("\n", " ")
