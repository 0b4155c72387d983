"""torch's elastic agent, run until its ranks end, and a word to the controller on how they did."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfsearch.workers.messages import LAUNCHER_REPORT


def run_ranks(
    directory: Path,
    options: Callable[[], argparse.Namespace],
    entry: tuple[Callable[..., Any], list[str]] | None = None,
) -> int:
    """Run the ranks that torchrun's options ask for; 0 when all of them ended on purpose.

    Args:
        directory: of the group; a report of what failed is left there, unless it is gone.
        options: makes torchrun's options. An error in it is reported, too.
        entry: a function that each rank calls and its arguments; ``None``: the script that the
            options name.

    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    report: dict[str, Any] = {"failures": [], "error": None}
    try:
        config, command, given = run.config_from_args(options())
        entrypoint, arguments = entry or (command, given)
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)
    except ChildFailedError as error:
        report["failures"] = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
    except Exception as error:
        report["error"] = {"type": type(error).__name__, "message": str(error)}
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        return 0
    if directory.exists():
        (directory / LAUNCHER_REPORT).write_text(json.dumps(report))
    return 1
