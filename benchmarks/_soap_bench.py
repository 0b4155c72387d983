"""Where `soap_gpu.py` measures, how it starts the command and runners, and one visit of a plan."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _store import Store

from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose
from perfsearch.runners.base import Plan as MeasuringPlan
from perfsearch.runners.base import Runner
from perfsearch.runners.ddp.runner import DDP
from perfsearch.runners.soap.runner import Soap

HERE = Path(__file__).parent.absolute()
MODELS = {"dlrm": 1024, "wide": 256, "convolutions": 1024}
"""Global batch of each job."""


def with_repository() -> dict[str, str]:
    """The environment, with perfsearch to be imported from this repository."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


class Bench:
    """Where, how large, and until when.

    Args:
        arguments: of the command line.

    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.ranks: int = arguments.ranks
        self.device: str = arguments.device
        self.store = Store(arguments.store)
        self.directory: Path = arguments.store.with_suffix("").absolute()
        self.deadline = time.monotonic() + arguments.until_s
        self.confirmed = [
            "confirm.finalists=1",
            "confirm.max_repeats=3",
            f"confirm.seconds={arguments.confirm_seconds}",
        ]

    def seconds_left(self) -> float:
        """Until nothing more is started."""
        return self.deadline - time.monotonic()

    def keys(self, factory: str, batch: int) -> dict[str, Any]:
        """What every run of a model shares."""
        return {
            "workload": {
                "name": "custom", "factory": f"_soap_jobs:{factory}", "global_batch": batch,
                "draws_in_loader": False,
            },
            "nproc": self.ranks,
            "limits": {"startup_s": 240, "trial_s": 60},
        }  # fmt: skip

    def command(self, runner: str, factory: str, batch: int, run_dir: Path, *more: str) -> int:
        """Run the command as a user does, its output shown."""
        line = [
            sys.executable, "-m", "perfsearch.cli.search", f"runner={runner}", "workload=custom",
            f"workload.factory=_soap_jobs:{factory}", f"workload.global_batch={batch}",
            "workload.draws_in_loader=false",
            f"nproc={self.ranks}", f"runner.device={self.device}", f"run_dir={run_dir}",
            "tracking.enabled=false", "limits.startup_s=240", "limits.trial_s=60", *more,
        ]  # fmt: skip
        print("$", " ".join(line), flush=True)
        limit = max(self.seconds_left(), 30.0)
        with subprocess.Popen(line, cwd=HERE, env=with_repository()) as process:
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()  # it records what it has; the same command goes on from there
                process.wait(60)
                return 143

    @contextmanager
    def soap(self, model: str) -> Iterator[Soap]:
        """A runner on a search's tables, with processes of its own."""
        keys = self.keys(model, MODELS[model])
        tables = self.directory / f"search-{model}" / "soap"
        runner = {"name": "soap", "device": self.device, "tables": str(tables)}
        with self._opened(Soap, {**keys, "runner": runner}) as made:
            yield made

    @contextmanager
    def ddp(self, factory: str, knobs: dict[str, Any]) -> Iterator[DDP]:
        """DistributedDataParallel with these knobs and no others."""
        runner = {"name": "ddp", "device": self.device, "knobs": knobs}
        with self._opened(DDP, {**self.keys(factory, MODELS["dlrm"]), "runner": runner}) as made:
            yield made

    @contextmanager
    def _opened(self, kind: Any, plain: dict[str, Any]) -> Iterator[Any]:
        os.chdir(HERE)  # the jobs' module is imported from where the command is run
        with tempfile.TemporaryDirectory() as directory:
            settings = validate({"strategy": {"name": "mcmc"}, **plain, "run_dir": directory})
            made = kind.from_settings(settings)
            made.open(Path(directory))
            try:
                yield made
            finally:
                made.close()


def visit(runner: Runner, configuration: dict[str, Any], number: int) -> dict[str, Any]:
    """Measure warm; what to keep."""
    logs = Path(tempfile.gettempdir()) / "soap_gpu_logs" / f"{os.getpid()}-{number}"
    plan = MeasuringPlan(
        number, Purpose.CONFIRM, time_limit_s=300.0, log_directory=logs, scored_seconds=2.0
    )
    outcome = runner.measure(configuration, plan)
    kept: dict[str, Any] = {"status": str(outcome.status), "reason": outcome.reason}
    if outcome.measurement is not None:
        measured = outcome.measurement
        kept["step_ms"] = 1e3 * measured.step_time_s
        kept["peak_gib"] = measured.peak_allocated_gib
        kept["loss"] = measured.first_losses[:1]
        kept["in_force"] = measured.in_force
        kept["operators"] = measured.environment.get("operators", {})
    return kept
