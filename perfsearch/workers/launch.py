"""The launcher: ``python -m perfsearch.workers.launch``, started once by the controller.

It imports torch once and then forks for every group of ranks that it is asked for on standard
input, so that new processes cost no import. In the fork torch's own launcher (torchrun's agent)
runs the ranks, forked in their turn. Nothing but importing is done before a fork, and drawing the
weights of a built-in workload (``prepared``): no CUDA context and no thread, and ranks seed their
own random numbers. So a forked process is as fresh as a new one, apart from what libraries read of
the environment while they are imported (see ``preload.LATE_PREFIXES``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.workers import prepared
from perfsearch.workers.elastic import run_ranks
from perfsearch.workers.forking import serve_forks
from perfsearch.workers.messages import TORCH_LOGS, Startup
from perfsearch.workers.watch import watch_controller

RENDEZVOUS_FILE = "rendezvous"


def torchrun_arguments(startup: Startup, directory: Path) -> list[str]:
    """The command line for torch's launcher."""
    spec = startup.spec
    arguments = [f"--nproc-per-node={spec.nproc}", "--max-restarts=0", "--rdzv-backend=c10d"]
    arguments.append(f"--log-dir={directory / TORCH_LOGS}")  # by default a new one, never removed
    if spec.nnodes == 1:
        # Through a file: torch's TCP store listens on every interface, and reads pickles.
        arguments += ["--nnodes=1", "--rdzv-conf=store_type=file", "--local-addr=localhost"]
        arguments += [f"--rdzv-endpoint={directory / RENDEZVOUS_FILE}"]
        arguments += [f"--rdzv-id={directory.name}"]
    else:
        arguments += [f"--nnodes={spec.nnodes}", f"--rdzv-endpoint={spec.rdzv_endpoint}"]
        arguments += ["--rdzv-id=perfsearch"]
    return [*arguments, "--start-method=fork", "-m", "perfsearch.workers.rank", str(directory)]


def run_group(directory: Path) -> int:
    """Run the group until its ranks end; 0 when all of them did so on purpose."""
    from torch.distributed import run

    from perfsearch.workers.rank import serve

    startup = Startup.read(directory)
    watch_controller(startup, directory)
    if startup.spec.nnodes == 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # nobody needs that one either
    return run_ranks(
        directory,
        lambda: run.parse_args(torchrun_arguments(startup, directory)),
        (serve, [str(directory)]),
    )


def _prepare(request: Mapping[str, Any]) -> None:
    spec = Startup.read(Path(request["directory"])).spec
    prepared.prepare(spec.workload, spec.seed)


def _run(request: Mapping[str, Any]) -> int:
    # torch's launcher asks whether there is a GPU. Asked of NVML, that leaves CUDA untouched;
    # asked of CUDA, no fork from here could use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return run_group(Path(request["directory"]))


_NEEDED_BY_RANKS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.optim",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "perfsearch.parallel.ddp",
    "perfsearch.workers.loop",
    "perfsearch.workers.rank",
    "perfsearch.workers.trainer",
    "perfsearch.workloads.gpt",
)


def _import_what_ranks_need() -> None:
    for name in _NEEDED_BY_RANKS:
        importlib.import_module(name)


def main(arguments: Sequence[str]) -> int:
    """``CONTROLLER_PID STARTED``: fork groups on demand. ``DIRECTORY``: run that group here."""
    if len(arguments) == 1:
        return run_group(Path(arguments[0]))
    _import_what_ranks_need()
    os.write(1, b'{"ready": true}\n')
    return serve_forks(int(arguments[0]), float(arguments[1]), _run, _prepare)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
