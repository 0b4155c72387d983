"""How a script's ranks are launched: what they are told, and torch's launcher in a search.

``python -m perfsearch.instrument.launch CONTROLLER_PID STARTED`` imports torch's launcher once, and
forks for each start of the script that it is asked for on standard input. The ranks are new
processes, and so is a script that is started as ``python`` starts it. With ``--ahead`` it first
imports what the script's first start had imported (``imports.py``), which the first line tells, and
ranks may be forks too (``forked.py``). Importing this module imports no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from perfsearch.core.knob import Value
from perfsearch.core.python import OPTIONS, large_imports

VARIABLE = "PERFSEARCH_SCRIPT"
"""Holds ``LaunchConfig`` as JSON in each rank that ``perfsearch-run`` starts."""

ENTRY = "perfsearch.instrument.entry"
"""Module that torch's launcher runs in place of the script."""


_LAST_MOMENTS = 40
"""How often is looked whether the controller is gone, once its end of a pipe is closed."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a script is to be run: what its processes are told, through one environment variable.

    Attributes:
        script: its path, or the module's name.
        module: whether ``script`` is a module.
        knobs: values to put into force; ``None`` leaves what the script itself says.
        autotune: options of tuning while it trains; ``None``: none.
        report: whether rank 0 says what was, or could be, changed.
        report_after_steps: steps after which it says so.
        directory: of the search that started it, with a socket for each rank; empty: no search.
        log_directory: where the ranks of a search log.
        undo: where a rank of a search records what it does to files; empty: nowhere.
        seed: of that search; its ranks' generators are seeded before the script begins.
        perturbed: whether weights are changed after the first step by what rounding does.
        mapped: knobs that were given to the script by its own arguments or files, and how.
        given: their values.
        by_torchrun: the command that has torchrun start the script, where it was started as
            ``python`` starts it and may turn out to need that; empty: it is as it is.
        tells_imports: whether rank 0 of a search tells what it has imported at its first step.

    """

    script: str
    module: bool = False
    knobs: dict[str, Value] = field(default_factory=dict)
    autotune: dict[str, Any] | None = None
    report: bool = True
    report_after_steps: int = 3
    directory: str = ""
    log_directory: str = ""
    undo: str = ""
    seed: int = 0
    perturbed: bool = False
    mapped: dict[str, str] = field(default_factory=dict)
    given: dict[str, Value] = field(default_factory=dict)
    by_torchrun: list[str] = field(default_factory=list)
    tells_imports: bool = False

    def to_environment(self) -> dict[str, str]:
        """The variable to set for the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LaunchConfig:
        """What ``to_environment`` set.

        Raises:
            KeyError: nothing was set.

        """
        return cls(**json.loads(environ[VARIABLE]))


def socket_path(directory: str | Path, rank: int) -> Path:
    """The socket on which the controller waits for rank ``rank``."""
    return Path(directory) / f"rank{rank}.sock"


SET_BY_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables by which a script sees that it is one of several ranks."""

_NEEDS_TORCHRUN = re.compile(
    r"\b(?:LOCAL_|GROUP_)?RANK\b|\b(?:LOCAL_)?WORLD_SIZE\b|\bMASTER_(?:ADDR|PORT)\b|\bTORCHELASTIC_"
    r"|[Dd]efault process group has not been initialized"
    r"|\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b"
)


def calls_for_torchrun(last_words: str) -> bool:
    """Whether what a script ended with names what it has only where torchrun starts it."""
    return _NEEDS_TORCHRUN.search(last_words) is not None


class Finished(SystemExit):
    """The window is full: the script has done what it was started for."""


_RANKS = "--nproc-per-node="

FORKED = "--forked"
"""The first argument of a start whose ranks are forks of the process that has imported ahead."""

AHEAD = "--ahead"
"""Has that process import ahead."""


def torchrun_arguments(nproc: int) -> list[str]:
    """What is asked of torchrun, beside how the ranks of all nodes meet."""
    return [f"{_RANKS}{nproc}"]


def python_arguments() -> list[str]:
    """What one process is given that is started as ``python`` starts it."""
    return ["-u", *OPTIONS]


def _to_entry() -> list[str]:
    """What Python is given to run our entry."""
    return [*python_arguments(), "-m", ENTRY]


def run_start(directory: Path, arguments: list[str]) -> int:
    """Carry out one start of the script; 0 when its processes ended on purpose.

    Args:
        directory: of the start.
        arguments: ``torchrun_arguments``, or ``python_arguments``, then ``-m``, our entry, and
            what that is given; ``FORKED`` before them.

    """
    from perfsearch.workers.forkserver import agent_arguments, leave_report, run_ranks

    if arguments[0] == FORKED:
        _have_ranks_forked()
        arguments = arguments[1:]
    if arguments[0].startswith(_RANKS):
        nproc, rest = int(arguments[0].removeprefix(_RANKS)), arguments[1:]
        return run_ranks(directory, lambda: options_of([*agent_arguments(directory, nproc), *rest]))
    code = subprocess.call([sys.executable, *arguments])
    if code:
        leave_report(directory, [{"rank": 0, "exit_code": code, "time": time.time()}])
    return code


class UsageError(Exception):
    """torch's launcher takes one of its options otherwise than it is given here."""


def options_of(arguments: list[str]) -> argparse.Namespace:
    """What torchrun's parser makes of its own options; the script's never come before it.

    Some versions of ``argparse`` take an argument of the script for one of the launcher's options
    where it is the beginning of one.

    Args:
        arguments: torchrun's options, ``-m``, our entry, and what that is given.

    Raises:
        UsageError: an option is wrong.

    """
    from torch.distributed import run

    after = arguments.index(ENTRY) + 1
    try:
        parser: argparse.ArgumentParser = run.get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign, assignment]
        options = parser.parse_args(arguments[:after])
    except ValueError as error:  # a variable PET_... that is none of its values
        raise UsageError(str(error)) from error
    return by_python(options, *arguments[after:])


def by_python(options: argparse.Namespace, *arguments: str) -> argparse.Namespace:
    """Torchrun's options, changed to run our entry.

    torchrun itself cannot give Python options.

    Args:
        options: as its parser made them.
        arguments: of our entry.

    """
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # which is torchrun's own variable
    words = [*_to_entry(), *arguments]
    changed: dict[str, Any] = {"no_python": True, "module": False, "run_path": False}
    changed.update(training_script=python, training_script_args=words)
    return argparse.Namespace(**{**vars(options), **changed})


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


_ground: list[Any] = []
"""What forked ranks begin with, once this process has imported ahead."""


def _have_ranks_forked() -> None:
    from perfsearch.instrument.entry import main as entry
    from perfsearch.instrument.forked import have_ranks_forked

    words = [sys.executable, *_to_entry()]
    have_ranks_forked(entry, _ground[0], words)


_NEEDED_BY_RANKS = ("entry", "rank", "script", "store")
"""Modules of this package that a rank imports; they import torch."""


def _import_ahead() -> dict[str, Any]:
    """Import what the first line of standard input tells of; what came of it, for the answer."""
    from perfsearch.instrument import forked, imports, patching

    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65_536)
        if not chunk:
            return {}
        line += chunk
    told = json.loads(line)
    forked.write_at_once()
    asked = imports.Imports.from_json(told["imports"])
    done = imports.import_ahead(asked, told["by_torchrun"])
    patching.held_elsewhere = True
    if "torch" in sys.modules:
        for name in _NEEDED_BY_RANKS:
            importlib.import_module(f"perfsearch.instrument.{name}")
    if told["by_torchrun"]:
        _import_torchrun()
    imports.ahead = asked
    return {"left_out": done.left_out, "with_them": sorted(done.with_them)}


def _import_torchrun() -> None:
    with large_imports():
        for name in ("torch.distributed.launcher.api", "torch.distributed.run"):
            importlib.import_module(name)


def _prepare(arguments: list[str]) -> None:
    """Import torch's launcher before the fork, where the start is one by that."""
    if any(word.startswith(_RANKS) for word in arguments[:2]):
        _import_torchrun()


def main(controller_pid: int, controller_started: float, ahead: bool = False) -> int:
    """Fork launchers until the controller is gone, or has no more to start.

    Args:
        controller_pid: whose end ends this.
        controller_started: when that process was started.
        ahead: whether to import ahead.

    """
    from perfsearch.instrument.user_files import recover
    from perfsearch.workers.forkserver import serve_forks
    from perfsearch.workers.processes import ending_with_controller, is_alive

    found: dict[str, Any] = {}
    if ahead:
        put_back = partial(recover, Path.cwd())
        with large_imports(), ending_with_controller(controller_pid, controller_started, put_back):
            found = _import_ahead()
        from perfsearch.instrument.forked import Ground

        _ground.append(Ground.here())
    os.write(1, json.dumps({"ready": True, **found}).encode() + b"\n")
    code = serve_forks(
        controller_pid,
        controller_started,
        lambda request: run_start(Path(request["directory"]), request["arguments"]),
        lambda request: _prepare(request["arguments"]),
    )
    for _ in range(_LAST_MOMENTS):
        if not is_alive(controller_pid, controller_started):
            recover(Path.cwd())  # which a controller that lives does itself
            break
        time.sleep(0.05)
    return code


if __name__ == "__main__":
    code = main(int(sys.argv[1]), float(sys.argv[2]), AHEAD in sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch's modules down costs a second and frees nothing
