"""A process that has imported what takes long, and forks launchers from what it has in hand."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perfsearch.core.files import private, write_text
from perfsearch.core.python import large_imports, let_warnings_be_warnings
from perfsearch.workers import processes
from perfsearch.workers.messages import (
    EXIT_FILE,
    LAUNCHER_REPORT,
    STORE_PORT_FILE,
    TORCH_LOGS,
    Place,
    Startup,
    keep_worker_sockets,
)
from perfsearch.workers.processes import (
    EXIT_ORPHANED,
    ending_with_controller,
    watch_controller,
)

_ORPHAN_CHECK_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36

Request = Mapping[str, Any]
"""A line on standard input: ``directory`` of a group, its ``environment``, the variables to
``unset``, the ``log``, and whatever ``run`` wants."""


def serve_forks(
    controller_pid: int,
    controller_started: float,
    run: Callable[[Request], int],
    prepare: Callable[[Request], None] = lambda request: None,
) -> int:
    """Fork for each line on standard input, until it closes or the controller is gone.

    Args:
        controller_pid: whose end ends this.
        controller_started: when that process was started.
        run: called in the fork; gives its exit code.
        prepare: called before the fork, which then begins with what that left.

    """
    gc.collect()  # once here, and not during some step in every fork
    _become_subreaper()
    directories: dict[int, Path] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    unread = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [], _ORPHAN_CHECK_S)
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(directories)
        if not processes.is_alive(controller_pid, controller_started):
            return EXIT_ORPHANED
        if 0 not in ready:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            return 0
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            prepare(request)
            pid = os.fork()
            if pid == 0:
                os.close(wake_read)
                os.close(wake_write)
                _become(request, run)
            directories[pid] = Path(request["directory"])
            answer = {"pid": pid, "started": processes.started_at(pid)}
            os.write(1, json.dumps(answer).encode() + b"\n")


def _become(request: Request, run: Callable[[Request], int]) -> NoReturn:
    """In the fork: a session, environment and log of its own, then ``run``; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.update(request["environment"])
        for name in request["unset"]:
            os.environ.pop(name, None)
        tempfile.tempdir = None  # found anew, in this environment
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = private(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        keep_worker_sockets(request["directory"])
        _end_with_owner(Path(request["directory"]))
        code = run(request)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking torch's modules down costs a second and frees nothing


def _end_with_owner(directory: Path) -> None:
    """End a group when whoever owns it here is gone, also before a rank is there to see it.

    A launcher may wait for minutes for a store that went with the owner.
    """
    place = Place.read(directory)
    spare = [place.forked_from]  # which sees it by itself
    watch_controller(place.owner_pid, place.owner_started, place.token, directory, spare)


def _reap(directories: dict[int, Path]) -> None:
    """Leave the exit code of each fork that ended where the controller looks for it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        directory = directories.pop(pid, None)  # none of an orphan that came to this process
        if directory is not None:
            with contextlib.suppress(FileNotFoundError):  # the group is gone
                code = os.waitstatus_to_exitcode(status)
                write_text(directory / EXIT_FILE, str(code), make=False)


def _become_subreaper() -> None:
    """Become the parent of every descendant that loses its own, so that none gets out of sight.

    One that has also lost its environment could not be found by the group's token.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# -----------------------------------------------------------------------------
# The launcher: ``python -m perfsearch.workers.forkserver``, started once by the controller.
#
# It imports torch once and then forks for every group of ranks that it is asked for on standard
# input, so that new processes cost no import. In the fork torch's own launcher (torchrun's
# agent) runs the ranks, forked in their turn. Nothing but importing is done before a fork, and
# drawing the weights of a built-in workload (``prepared_job``): no CUDA context and no thread, and
# ranks seed their own random numbers. So a forked process is as fresh as a new one, apart from
# what libraries read of the environment while they are imported (see ``preload.LATE_PREFIXES``).

RENDEZVOUS_FILE = "rendezvous"
_LOOPBACK = "127.0.0.1"
_STORE_S = 300.0
_LOOK_S = 0.02


def agent_arguments(directory: Path, nproc: int) -> list[str]:
    """Options of torchrun for the ranks of one group on this node.

    On one node they meet through a file: torch's TCP store listens on every interface, and the
    rendezvous through it reads pickles. On several nodes they meet at a store that only this host's
    loopback reaches, and that holds none; whoever holds a node's place carries its bytes there.
    """
    place = Place.read(directory)
    arguments = [f"--nproc-per-node={nproc}", f"--nnodes={place.nnodes}", "--max-restarts=0"]
    arguments.append(f"--log-dir={directory / TORCH_LOGS}")  # by default a new one, never removed
    arguments += [f"--rdzv-id={place.group}", "--local-addr=localhost"]
    if place.nnodes == 1:
        arguments += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
        return [*arguments, f"--rdzv-endpoint={directory / RENDEZVOUS_FILE}"]
    port = place.store_port or int((directory / STORE_PORT_FILE).read_text())
    arguments += ["--rdzv-backend=static", f"--node-rank={place.node}"]
    return [*arguments, f"--master-addr={_LOOPBACK}", f"--master-port={port}"]


def torchrun_arguments(startup: Startup, directory: Path) -> list[str]:
    """The command line for torch's launcher."""
    options = agent_arguments(directory, startup.spec.nproc)
    return [*options, "--start-method=fork", "-m", "perfsearch.workers.rank", str(directory)]


def run_group(directory: Path) -> int:
    """Run the group until its ranks end; 0 when all of them did so on purpose."""
    from torch.distributed import run

    from perfsearch.workers.rank import serve

    startup = Startup.read(directory)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # nobody needs that one either
    return run_ranks(
        directory,
        lambda: run.parse_args(torchrun_arguments(startup, directory)),
        (serve, [str(directory)]),
    )


def _prepare(request: Mapping[str, Any]) -> None:
    directory = Path(request["directory"])
    spec, place = Startup.read(directory).spec, Place.read(directory)
    from perfsearch.workers.prepared_job import prepare_job

    with ending_with_controller(place.owner_pid, place.owner_started):
        prepare_job(spec.workload, spec.seed)


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
    "perfsearch.training.ddp",
    "perfsearch.workers.prepared_job",
    "perfsearch.workers.rank",
    "perfsearch.workers.trial",
    "perfsearch.workloads.gpt",
)


def _import_what_ranks_need() -> None:
    with large_imports():
        for name in _NEEDED_BY_RANKS:
            importlib.import_module(name)


def main(arguments: Sequence[str]) -> int:
    """``CONTROLLER_PID STARTED``: fork groups on demand."""
    let_warnings_be_warnings()
    controller = int(arguments[0]), float(arguments[1])
    with ending_with_controller(*controller):
        _import_what_ranks_need()
    os.write(1, b'{"ready": true}\n')
    return serve_forks(*controller, _run, _prepare)


# -----------------------------------------------------------------------------
# torch's elastic agent, run until its ranks end, and a word to the controller on how they did.


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

    failures: list[dict[str, Any]] = []
    failed: Exception | None = None
    try:
        _serve_store(directory)
        config, command, given = run.config_from_args(options())
        entrypoint, arguments = (command, given)
        if entry is not None:
            # torch makes a file for each rank's error, which stays where its launcher is killed
            tempfile.tempdir = str(directory)
            entrypoint, arguments = _with_users_temporary_files(entry[0]), entry[1]
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
    except Exception as error:
        failed = error
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        return 0
    leave_report(directory, failures, failed)
    return 1


def _with_users_temporary_files(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ranks call, whose temporary files are where ``TMPDIR`` says."""

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        tempfile.tempdir = None
        return function(*arguments)

    return called


def _serve_store(directory: Path) -> None:
    """On the first of several nodes: serve the store at which all meet, to this host's loopback.

    torch's launcher would serve it itself, to everybody. It is served by a process of its own, as
    forks of one in which a store's thread runs may wait for ever, and the ranks are such forks.
    """
    place = Place.read(directory)
    if place.nnodes == 1:
        return
    _meet_as_clients()
    if place.node:
        return
    if os.fork() == 0:
        _be_store(directory, place)
    deadline = time.monotonic() + _STORE_S
    while not (directory / STORE_PORT_FILE).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the store at which ranks meet was not there in {_STORE_S:g} s")
        time.sleep(_LOOK_S)


def _be_store(directory: Path, place: Place) -> NoReturn:
    """In the fork: serve the store for as long as the group may need it."""
    try:
        import torch.distributed as dist

        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        write_text(directory / STORE_PORT_FILE, str(port))
        while directory.exists() and processes.is_alive(place.owner_pid, place.owner_started):
            time.sleep(_ORPHAN_CHECK_S)
        del store
    finally:
        os._exit(0)


def _meet_as_clients() -> None:
    """Have torch's launcher take the store as it is, on the first node too."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    original = StaticTCPRendezvous.next_rendezvous

    def next_rendezvous(self: Any) -> Any:
        if self._store is None:
            self._store = dist.TCPStore(
                self.master_addr, self.master_port, None, False, timedelta(seconds=_STORE_S)
            )
        return original(self)

    StaticTCPRendezvous.next_rendezvous = next_rendezvous


def leave_report(
    directory: Path, failures: Sequence[Mapping[str, Any]], error: Exception | None = None
) -> None:
    """Tell the controller what failed, unless the group's directory is gone, or its disk full.

    Args:
        directory: of the group.
        failures: ``rank``, ``exit_code`` and ``time`` of each rank that ended otherwise than meant.
        error: of the launcher itself.

    """
    told = error and {"type": type(error).__name__, "message": str(error)}
    report = {"failures": list(failures), "error": told}
    with contextlib.suppress(OSError):
        write_text(directory / LAUNCHER_REPORT, json.dumps(report), make=False)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
