"""Lend this node to a search that runs on another: ``python -m perfsearch.workers.join``.

The search is started on its own node with ``nnodes``, ``rdzv_endpoint`` and ``interface`` set; each
other node runs this with the same values. Whenever the search starts a group of ranks, this node
starts its share; it ends when no search has been there for a while.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from perfsearch.core.files import make_temporary_directory, remove_temporary_directory
from perfsearch.core.hardware import GroupSpec
from perfsearch.core.python import module_command
from perfsearch.workers import processes
from perfsearch.workers.messages import TOKEN_VARIABLE, Startup

_POLL_S = 0.5


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m perfsearch.workers.join", description=__doc__)
    parser.add_argument("--nnodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this node")
    parser.add_argument("--rdzv-endpoint", required=True, help="host:port of the search's node")
    parser.add_argument("--interface", default="", help="network interface of this node")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="where ranks log")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds without a search after which it ends"
    )
    return parser.parse_args(arguments)


def reachable(endpoint: str) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def serve_one(options: argparse.Namespace) -> None:
    """Start this node's ranks, and wait until they end."""
    spec = GroupSpec(
        workload={},
        device="",
        nproc=options.nproc,
        nnodes=options.nnodes,
        rdzv_endpoint=options.rdzv_endpoint,
        interface=options.interface,
    )
    token = uuid.uuid4().hex
    directory = make_temporary_directory()
    logs = options.logs.absolute()
    logs.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    Startup(spec, token, pid, processes.started_at(pid), str(logs)).write(directory)
    environment = {**os.environ, TOKEN_VARIABLE: token}
    if options.interface:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = options.interface
    try:
        with open(logs / "launcher.log", "ab") as log:
            subprocess.run(
                module_command("perfsearch.workers.forkserver", str(directory)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                check=False,
            )
    finally:
        processes.end_all(token, grace_s=2.0)
        remove_temporary_directory(directory)


def main(arguments: Sequence[str]) -> int:
    """Serve one group of ranks after another; 0 when there were any."""
    options = parse(arguments)
    served = 0
    last = time.monotonic()
    while time.monotonic() - last < options.patience:
        if reachable(options.rdzv_endpoint):
            serve_one(options)
            served += 1
            last = time.monotonic()
        time.sleep(_POLL_S)
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
