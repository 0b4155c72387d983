"""A search that is submitted to Slurm, and followed from where it was (``launcher.submit``)."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch.config.options import build_options
from perfsearch.config.schema import Settings
from perfsearch.core import command
from perfsearch.core.errors import BadInputError
from perfsearch.core.extras import how_to_install
from perfsearch.core.python import module_command
from perfsearch.core.signals import ExitCode

FOLDER = Path("outputs") / "slurm"
"""Where submitit keeps what is said of a job, under its number."""

DEFAULT_TIME = "01:00:00"
"""Time limit of a job where none is given."""

_MODULES = {"perfsearch": "perfsearch", "perfsearch-run": "perfsearch.cli.run"}
_LOOK_S = 1.0
_ASK_S = 10.0


def submitted(settings: Settings) -> int | None:
    """Submit a search that is to be, and follow it; ``None`` where it is to run here.

    Returns:
        The exit code of the search.

    Raises:
        BadInputError: it cannot be submitted; nothing was.
        Interrupted: a signal came; the job is cancelled.

    """
    if settings.launcher.name != "slurm":
        return None
    from perfsearch.workers.launchers.slurm import Slurm

    options = build_options(Slurm.Options, settings.launcher.options, "launcher")
    if not options.submit:
        return None
    job = _submit(_words(), settings.nnodes, options.sbatch)
    print(f"submitted as Slurm's job {job.job_id}, which says what follows", flush=True)
    try:
        return _follow(job)
    except BaseException:
        job.cancel(check=False)
        raise


def run_there(words: Sequence[str]) -> int:
    """What the job does, on the first of its nodes; returns the exit code of the search."""
    return subprocess.run(list(words), check=False).returncode


def _words() -> list[str]:
    """The command that was given, as the job gives it."""
    given = command.given()
    if not given.is_known:
        raise BadInputError(
            "launcher.submit=true: from Python a search runs where it is called. Submit the "
            "program itself, by sbatch or submitit."
        )
    name, *words = shlex.split(given.again("launcher.submit=false"))
    return module_command(_MODULES[name], *words)


def _submit(words: Sequence[str], nnodes: int, sbatch: Sequence[str]) -> Any:
    """The job, submitted."""
    if shutil.which("sbatch") is None:
        raise BadInputError("launcher.submit=true: there is no sbatch here. Is this Slurm's?")
    try:
        import submitit
    except ImportError as error:
        raise BadInputError(
            f"launcher.submit=true needs submitit. Run: {how_to_install('submitit', 'launchers')}"
        ) from error
    executor = submitit.SlurmExecutor(folder=str(FOLDER / "%j"))
    executor.update_parameters(
        job_name="perfsearch",
        nodes=nnodes,
        ntasks_per_node=1,
        use_srun=False,  # the search itself has srun start what belongs on the other nodes
        stderr_to_stdout=True,
        additional_parameters={"time": DEFAULT_TIME, **parameters(sbatch)},
    )
    try:
        return executor.submit(run_there, list(words))
    except submitit.core.utils.FailedJobError as error:
        raise BadInputError(f"launcher.submit=true: {error}") from error


def parameters(sbatch: Sequence[str]) -> dict[str, Any]:
    """Options of ``sbatch`` as submitit takes them: ``--gpus-per-node=8`` or ``--exclusive``.

    Raises:
        BadInputError: one is written otherwise.

    """
    found: dict[str, Any] = {}
    for word in sbatch:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise BadInputError(
                f"launcher.sbatch={word}: allowed are long options, as in "
                '["--partition=gpu","--gpus-per-node=8","--time=04:00:00"]'
            )
        found[name] = value if equals else True
    return found


def _follow(job: Any) -> int:
    """Show what the job says until it has ended; return the exit code of the search."""
    shown, asked = 0, time.monotonic()
    while True:
        ended = job.paths.result_pickle.exists()
        if not ended and time.monotonic() - asked > _ASK_S:
            asked = time.monotonic()
            ended = not _is_queued(job.job_id) and not job.paths.result_pickle.exists()
        shown = _show(job.paths.stdout, shown)
        if ended:
            break
        time.sleep(_LOOK_S)
    if not job.paths.result_pickle.exists():
        print(f"perfsearch: Slurm's job {job.job_id} is gone without a result", file=sys.stderr)
        return ExitCode.NO_TRIAL_SUCCEEDED
    return int(job.task(0).result())  # the other nodes' tasks are never started, and have none


def _show(file: Path, shown: int) -> int:
    """Print what a file has beyond so many bytes; return how many it has."""
    if not file.exists():
        return shown
    with file.open("rb") as stream:
        stream.seek(shown)
        more = stream.read()
    sys.stdout.write(more.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(more)


def _is_queued(job_id: str) -> bool:
    """Whether Slurm still has the job; a ``squeue`` that fails leaves it open."""
    asked = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    forgotten = "Invalid job id" in told.stderr
    return bool(told.stdout.strip()) or (told.returncode != 0 and not forgotten)
