"""One script in one mode: started in a fresh copy, watched, ended with all that it started."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _handed_over import without_perfsearch
from _public_cases import Case
from _searched import found_in, key_words
from _watched import watched

CLOCKS = ("clock", "clock-again")
MODES = ("plain", "clock", "run", "profile", "search", CLOCKS[1], "autotune", "knobs", "handover")
KEPT_LINES = 200


class Bench:
    """One case, in all its modes.

    Args:
        case: the script.
        options: of the command line.

    """

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case = case
        self.options = options
        self.home = (options.store / case.name).absolute()
        self.tree = self.home / "tree"
        self.run_dir = self.home / "search"

    def can(self, mode: str) -> bool:
        """Whether there is what the mode starts from."""
        return mode not in ("knobs", "handover") or (self.run_dir / "best").is_dir()

    def run(self, mode: str) -> dict[str, Any]:
        """Start the script in a mode; return what was seen."""
        self._lay_out()
        before = self._files()
        command, environment = self._command(mode)
        record = self._start(command, environment, self.home / f"{mode}.log")
        after = self._files()
        record["written"] = sorted(_nameless(name) for name in after.keys() - before.keys())
        record["changed"] = sorted(n for n in before if after.get(n) != before[n])
        record["command"] = " ".join(command)
        record.update(self._found(mode))
        return record

    def _lay_out(self) -> None:
        """Put a fresh copy of the repository, with its data, where each mode is started."""
        kept = self.home / "prepared"
        if not kept.exists():
            begun = self.home / "being-prepared"
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir(parents=True)
            archive(self.case, self.options, begun)
            if self.case.prepare is not None:
                self.case.prepare(begun)
            begun.rename(kept)
        shutil.rmtree(self.tree, ignore_errors=True)
        shutil.copytree(kept, self.tree)

    def _files(self) -> dict[str, str]:
        """Every file of the copy, with its content's digest; caches of Python apart."""
        return {
            str(file.relative_to(self.tree)): hashlib.sha1(file.read_bytes()).hexdigest()
            for file in self.tree.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }

    def _environment(self) -> dict[str, str]:
        programs = Path(sys.executable).parent
        here = os.environ.copy()
        here.pop("RANK", None)
        here.update(
            PATH=f"{programs}:{here.get('PATH', os.defpath)}",
            OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1",
            HF_HOME=str(self.home / "hf"), MPLBACKEND="Agg", PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
        for pair in self.case.environment:
            name, _, value = pair.partition("=")
            here[name] = value.replace("{root}", str(self.tree))
        return here

    def _command(self, mode: str) -> tuple[list[str], dict[str, str]]:
        case, environment = self.case, self._environment()
        script = [case.script, *case.arguments]
        ranks = [f"--nproc-per-node={case.processes}"] if case.processes > 1 else []
        torchrun = ["torchrun", "--standalone", *ranks]
        started = torchrun if ranks else ["python"]
        tuned = ["perfsearch-run", *ranks]
        if mode == "plain":
            return [*started, *script], environment
        if mode in CLOCKS:
            clock = str(Path(__file__).with_name("_public_clock.py"))
            return [*started, clock, str(self.home / "clock.json"), *script], environment
        if mode == "run":
            return [*tuned, *script], environment
        if mode == "autotune":
            return [*tuned, "--autotune", *script], environment
        best = self.run_dir / "best"
        if mode == "knobs":
            return [*tuned, "--knobs", str(best / "config.yaml"), *script], environment
        if mode == "handover":
            alone = without_perfsearch(self.home / "alone", environment)
            return ["sh", str(best / "apply" / "run.sh")], alone
        shutil.rmtree(self._run_dir(mode), ignore_errors=True)
        keys = {"run_dir": self._run_dir(mode), "tracking.enabled": "false"}
        if mode == "search":
            seconds, trials = self.options.seconds, self.options.trials
            keys |= {"budget.trials": trials, "budget.seconds": seconds, "confirm.seconds": seconds}
        return [*tuned, f"--{mode}", *key_words(keys), *case.options, *script], environment

    def _run_dir(self, mode: str) -> Path:
        return self.run_dir if mode == "search" else self.home / "profile"

    def _start(self, command: list[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
        place = self.tree / self.case.folder
        ended = watched(command, place, environment, log, self.options.limit)
        return {
            "rc": ended.rc, "seconds": round(ended.seconds, 1), "left": ended.left,
            "lines": ended.lines[-KEPT_LINES:],
        }  # fmt: skip

    def _found(self, mode: str) -> dict[str, Any]:
        """What the mode left: readings of the clock, a journal, a summary."""
        if mode in CLOCKS:
            file = self.home / "clock.json"
            return clock_of(json.loads(file.read_text())) if file.exists() else {"steps": 0}
        if mode not in ("search", "profile"):
            return {}
        return found_in(self._run_dir(mode))


def archive(case: Case, options: argparse.Namespace, into: Path) -> None:
    """Write the paths of the repository, as they were at the commit, into a folder."""
    repository, commit = case.source
    name = repository.replace("/", "+")
    places = [options.sources / name / "repo", options.sources / name] if options.sources else []
    place = next((p for p in places if (p / "HEAD").exists() or (p / ".git").exists()), None)
    if place is None:
        place = options.store / "sources" / name
        if not place.exists():
            url = f"https://github.com/{repository}"
            fetch = ["fetch", "-q", "--depth=1", "--filter=blob:none", "origin", commit]
            subprocess.run(["git", "init", "-q", str(place)], check=True)
            subprocess.run(["git", "-C", str(place), "remote", "add", "origin", url], check=True)
            subprocess.run(["git", "-C", str(place), *fetch], check=True)
    paths = case.paths or (case.folder,)
    packed = subprocess.run(
        ["git", "-C", str(place), "archive", commit, *paths], check=True, capture_output=True
    )
    subprocess.run(["tar", "x", "-C", str(into)], input=packed.stdout, check=True)


_MOST_STEPS = 1000
"""Steps whose times are kept: no trial sees more."""


def clock_of(times: list[float]) -> dict[str, Any]:
    """Steps, and the time that each of the first took."""
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    return {
        "steps": len(times),
        "step_ms": [round(1e3 * gap, 3) for gap in gaps[:_MOST_STEPS]],
        "mean_of_all_s": statistics.fmean(gaps) if gaps else None,
    }


def _nameless(name: str) -> str:
    """A file's name with its numbers taken out: times, process ids, random names of caches."""
    return re.sub(r"[0-9a-f]{16,}|\d+", "N", name)
