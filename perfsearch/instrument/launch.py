"""torch's launcher for the script of a search, and a word on how its ranks ended.

``python -m perfsearch.instrument.launch CONTROLLER_PID STARTED`` imports it once, and forks for
each start of the script that it is asked for on standard input. The ranks are new processes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from perfsearch.instrument.facts import ENTRY
from perfsearch.workers.forkserver import run_ranks, serve_forks
from perfsearch.workers.messages import TORCH_LOGS


def torchrun_arguments(directory: Path, nproc: int) -> list[str]:
    """Options of torchrun for ranks of this node alone, which meet through a file."""
    return [
        f"--nproc-per-node={nproc}",
        "--nnodes=1",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={directory / 'rendezvous'}",
        f"--rdzv-id={directory.name}",
        "--local-addr=localhost",
        f"--log-dir={directory / TORCH_LOGS}",  # by default a new one, never removed
    ]


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
    options.training_script_args = arguments[after:]
    return options


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)


def main(controller_pid: int, controller_started: float) -> int:
    """Fork launchers until the controller is gone, or has no more to start."""
    for name in ("torch.distributed.launcher.api", "torch.distributed.run"):
        importlib.import_module(name)
    os.write(1, b'{"ready": true}\n')
    return serve_forks(
        controller_pid,
        controller_started,
        lambda request: run_ranks(
            Path(request["directory"]), lambda: options_of(request["arguments"])
        ),
    )


if __name__ == "__main__":
    code = main(int(sys.argv[1]), float(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch's modules down costs a second and frees nothing
