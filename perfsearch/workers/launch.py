"""Start the ranks with torch's own launcher: ``python -m perfsearch.workers.launch DIRECTORY``.

The directory holds the group's ``Startup``. How ranks ended is left there as JSON, so that the
controller needs to read no log to learn which rank died of what.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from perfsearch.workers.messages import LAUNCHER_REPORT, Startup
from perfsearch.workers.watch import watch_controller


def torchrun_arguments(startup: Startup, directory: Path) -> list[str]:
    """The command line for torch's launcher."""
    spec = startup.spec
    arguments = [f"--nproc-per-node={spec.nproc}", "--max-restarts=0", "--rdzv-backend=c10d"]
    if spec.nnodes == 1:
        arguments += ["--nnodes=1", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
        arguments += [f"--rdzv-id={startup.token}"]
    else:
        arguments += [f"--nnodes={spec.nnodes}", f"--rdzv-endpoint={spec.rdzv_endpoint}"]
        arguments += ["--rdzv-id=perfsearch"]
    return [*arguments, "-m", "perfsearch.workers.rank", str(directory)]


def main(directory: Path) -> int:
    """Run the group until its ranks end; 0 when all of them did so on purpose."""
    startup = Startup.read(directory)
    watch_controller(startup)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    report: dict[str, Any] = {"failures": [], "error": None}
    try:
        run.run(run.parse_args(torchrun_arguments(startup, directory)))
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
    (directory / LAUNCHER_REPORT).write_text(json.dumps(report))
    return 1


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch's modules down costs a second and frees nothing
