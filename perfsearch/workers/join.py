"""Lend this node to a search that runs on another: ``perfsearch join HOST:PORT``.

A search over several nodes prints the whole command. It is run once on each other node, and stays
for as long as the search: it starts this node's share of each group of ranks, tells how it ended,
and ends it when the search is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.cgroup import KernelMemory
from perfsearch.core.files import make_temporary_directory, remove_temporary_directory, write_text
from perfsearch.core.signals import ExitCode
from perfsearch.metrics.system import SystemSampler
from perfsearch.workers import processes
from perfsearch.workers.failures import FailureFiles
from perfsearch.workers.group import Devices, report_of
from perfsearch.workers.launchers import _agreement
from perfsearch.workers.launchers._addresses import interface_variables, interface_with
from perfsearch.workers.launchers._gate import SECRET_VARIABLE, Doors, StrangerError
from perfsearch.workers.launchers._nodes import STORE
from perfsearch.workers.messages import (
    TOKEN_VARIABLE,
    Channel,
    ChannelClosed,
    Message,
    Place,
    socket_directory,
)
from perfsearch.workers.preload import ForkedLauncher, LauncherGone, Preloaded, early_variables

_POLL_S = 0.1
_AGAIN_S = 1.0
_TERM_S = 1.0
_FREE_S = 10.0
_BEFORE_S = 1.0
"""An error is of the present trial if it is no older than this when the trial begins."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="perfsearch join",
        description="Lends this node to a search over several nodes, which prints the whole "
        "command. It stays until the search is over.",
    )
    parser.add_argument("endpoint", metavar="HOST:PORT", help="where the search listens")
    parser.add_argument(
        "--interface", default="", help="network interface of the ranks' sockets on this node"
    )
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="longest wait for the search to be there"
    )
    parser.add_argument(
        "--secret-from-input",
        action="store_true",
        help=f"read the search's secret from standard input, not from {SECRET_VARIABLE}",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Lend this node; return the exit code: 0 once the search is over."""
    options = make_parser().parse_args(arguments)
    given = os.environ.pop(SECRET_VARIABLE, "")  # not for what is started here
    secret = sys.stdin.readline().strip() if options.secret_from_input else given
    host, _, port = options.endpoint.rpartition(":")
    if not secret:
        say(f"{SECRET_VARIABLE} is not set. Copy the whole command that the search has printed")
        return ExitCode.BAD_INPUT
    if not host or not port.isdigit():
        say(f"{options.endpoint}: give it as HOST:PORT, as the search has printed it")
        return ExitCode.BAD_INPUT
    member = Member((host, int(port)), secret, options.interface, options.wait_s)
    try:
        return member.lend()
    finally:
        member.close()


def say(text: str) -> None:
    """One line for people."""
    print(f"perfsearch join: {text}", flush=True)


class Member:
    """A node, as the search has it that it is lent to.

    Args:
        gate: host and port at which the search listens.
        secret: of the search.
        interface: of the ranks' sockets; empty: as the search says.
        wait_s: longest wait for the search.

    """

    def __init__(self, gate: tuple[str, int], secret: str, interface: str, wait_s: float) -> None:
        self._gate, self._secret, self._interface, self._wait_s = gate, secret, interface, wait_s
        self._instance = uuid.uuid4().hex
        self._directory = make_temporary_directory()
        self._doors = Doors(gate, secret)
        self._preloaded: Preloaded | None = None
        self._shares: dict[str, Share] = {}
        self._logs_since = time.time()
        self._memory_before = KernelMemory.read()
        self._node: Message = {}
        self._sampler: SystemSampler | None = None

    def lend(self) -> int:
        """Serve the search until it is over; return the exit code."""
        where = f"{self._gate[0]}:{self._gate[1]}"
        deadline, told = time.monotonic() + self._wait_s, False
        while True:
            try:
                channel = Channel(self._doors.call())
            except StrangerError as error:
                say(f"{where}: {error}. Copy the whole command that the search has printed")
                return ExitCode.BAD_INPUT
            except (OSError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    say(
                        f"no search was to be reached at {where} within {self._wait_s:g} s: {error}"
                    )
                    return ExitCode.NO_TRIAL_SUCCEEDED
                if not told:
                    told = True
                    say(f"waiting for the search at {where} ({str(error) or 'no answer'})")
                time.sleep(_AGAIN_S)
                continue
            code = self._serve(channel)
            channel.close()
            if code is not None:
                return code
            say(f"the search at {where} is out of reach: what it had here is ended")
            deadline, told = time.monotonic() + self._wait_s, False

    def _serve(self, channel: Channel) -> int | None:
        """Do what the search says; the exit code, or ``None`` where it is out of reach."""
        try:
            name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
            channel.send(
                {"event": "join", "instance": self._instance, "name": name, **_agreement.facts()}
            )
            first = channel.receive()
            if first["op"] == "refuse":
                say(f"refused: {first['reason']}")
                return ExitCode.BAD_INPUT
            self._node, self._wait_s = first, float(first["wait_s"])
            say(f"joined as node {first['node']} of {first['nnodes']}, {first['host']}")
            self._sample(float(first["sample_s"]))
            address = channel.own_address
            while True:
                try:
                    message = channel.receive(_POLL_S)
                except TimeoutError:
                    self._tell_ends(channel)
                    continue
                if message["op"] == "close":
                    say("the search is over")
                    return ExitCode.DONE
                self._obey(message, channel, address)
        except ChannelClosed:
            return None
        finally:
            self._end_shares()

    def _obey(self, message: Message, channel: Channel, address: str) -> None:
        group = str(message["group"])
        match message["op"]:
            case "logs":
                self._logs_since = time.time() - _BEFORE_S
                self._memory_before = KernelMemory.read()
            case "start":
                try:
                    self._start(message, address)
                except (OSError, TimeoutError, LauncherGone) as error:
                    told = f"{type(error).__name__}: {error}"
                    channel.send({"event": "ended", "group": group, "code": 1})
                    if group in self._shares:
                        self._shares[group].error = told
            case "sample":
                self._sample(float(message["interval_s"]))
            case "window":
                channel.send({"event": "window", "group": group, "means": self._means(message)})
            case "report" if group in self._shares:
                channel.send({"event": "report", "group": group, **self._report(message)})
            case "end":
                share = self._shares.pop(group, None)
                if share is not None:
                    share.end()
                channel.send({"event": "over", "group": group})
            case unknown:
                raise ChannelClosed(f"the search said {unknown!r}, which means nothing here")

    def _start(self, message: Message, address: str) -> None:
        """Start this node's share of a group."""
        own, there = socket_directory(), Path(message["working_directory"])
        group = str(message["group"])
        share = self._shares[group] = Share(own, Doors(self._gate, self._secret))
        if not there.is_dir():
            raise FileNotFoundError(
                f"no directory {there} here: the search's working directory must be there on each "
                "node, with what the job needs of it"
            )
        message = in_json(message, message["directory"], str(own))
        port = share.open_doors(group, message["sockets"])
        for name, text in message["files"].items():
            write_text(own / Path(name).name, text)
        log = Path(message["log"])
        log = log.with_name(f"{log.stem}.node{self._node['node']}{log.suffix}")
        log.parent.mkdir(parents=True, exist_ok=True)
        preloaded = self._forked_from(message, there, log)
        me = os.getpid()
        Place(
            group=group,
            token=preloaded.token,
            owner_pid=me,
            owner_started=processes.started_at(me),
            forked_from=preloaded.pid,
            node=int(self._node["node"]),
            nnodes=int(self._node["nnodes"]),
            host=str(self._node["host"]),
            store_port=port,
        ).write(own)
        named = self._interface or str(self._node["interface"])
        environment = {
            **os.environ,
            **message["environment"],
            **interface_variables(named or interface_with(address), bool(named)),
            TOKEN_VARIABLE: preloaded.token,
        }
        more = {} if message["arguments"] is None else {"arguments": message["arguments"]}
        share.begin(preloaded, environment, log, float(message["limit_s"]), more)

    def _forked_from(self, message: Message, there: Path, log: Path) -> Preloaded:
        """A process with the group's imports done in the environment that the search gives it."""
        environment = {**os.environ, **message["preloaded"]}
        kept = self._preloaded
        fits = (
            kept is not None
            and kept.alive
            and (kept.module, kept.python) == (message["module"], message["python"])
            and kept.early == early_variables(environment)
        )
        if kept is not None and fits:
            return kept
        if kept is not None:
            kept.close(_TERM_S)
        self._preloaded = Preloaded(
            environment, self._directory, log, message["module"], there, message["python"]
        )
        return self._preloaded

    def _tell_ends(self, channel: Channel) -> None:
        """Say of each share that it has ended, once."""
        for group, share in self._shares.items():
            code = share.newly_ended()
            if code is not None:
                channel.send({"event": "ended", "group": group, "code": code})

    def _report(self, message: Message) -> Message:
        """What is known here of a group that failed."""
        share = self._shares[str(message["group"])]
        files = FailureFiles(Path(message["logs"]), int(message["world_size"]))
        memory, stacks = self._memory_before, bool(message["stacks"])
        report = report_of(share.directory, files, share.code, memory, stacks)
        errors = [error for error in report.errors if error.time >= self._logs_since]
        error = share.error or report.launcher_error
        return asdict(replace(report, errors=errors, launcher_error=error))

    def _sample(self, interval_s: float) -> None:
        """Sample this node's system metrics from now on; 0: not yet."""
        if self._sampler is None and interval_s:
            number = int(self._node["node"])
            self._sampler = SystemSampler(interval_s, process_ids=[os.getpid()], node=number)
            self._sampler.start()

    def _means(self, message: Message) -> dict[str, float]:
        """What was sampled in a window, which is given by how long ago it was."""
        now = time.monotonic()
        if self._sampler is None:
            return {}
        return self._sampler.window(now - message["begin_s"], now - message["end_s"])

    def _end_shares(self) -> None:
        shares, self._shares = self._shares, {}
        for share in shares.values():
            share.end()

    def close(self) -> None:
        """End everything that was started here."""
        self._end_shares()
        self._doors.close()
        if self._sampler is not None:
            self._sampler.stop()
        if self._preloaded is not None:
            self._preloaded.close(_TERM_S)
        remove_temporary_directory(self._directory)


@dataclass
class Share:
    """What one node has of a group.

    Attributes:
        directory: its own.
        doors: through which its ranks reach the search.
        error: why it could not be started; empty where it was.

    """

    directory: Path
    doors: Doors
    error: str = ""
    _preloaded: Preloaded | None = None
    _process: ForkedLauncher | None = None
    _told: bool = False
    _devices: Devices = field(default_factory=lambda: Devices(()))

    def open_doors(self, group: str, sockets: Sequence[str]) -> int:
        """Open what its ranks connect to; the port of the store."""
        for name in sockets:
            self.doors.open_socket(self.directory / Path(name).name, group, name)
        return self.doors.open_port(group, STORE)

    def begin(
        self,
        preloaded: Preloaded,
        environment: dict[str, str],
        log: Path,
        limit_s: float,
        more: dict[str, Any],
    ) -> None:
        """Start it.

        Raises:
            LauncherGone: what it is forked from ended.
            TimeoutError: it took too long.

        """
        if not hardware.torch_version().endswith("+cpu"):
            self._devices = Devices(hardware.visible_gpus())
            self._devices.note()
        self._preloaded = preloaded
        self._process = preloaded.fork(self.directory, environment, log, limit_s, **more)

    @property
    def code(self) -> int | None:
        """The exit code of its first process, once it has ended."""
        return None if self._process is None else self._process.poll()

    def newly_ended(self) -> int | None:
        """The same, once."""
        code = None if self._told else self.code
        self._told = self._told or code is not None
        return code

    def end(self) -> None:
        """End its processes and wait until its devices are free."""
        if self._preloaded is not None:
            processes.end_all(self._preloaded.token, _TERM_S, exclude=[self._preloaded.pid])
            self._devices.await_memory(_FREE_S)
        self.doors.close()
        remove_temporary_directory(self.directory)


def in_json(message: Message, old: str, new: str) -> Message:
    """A message in which another path stands for ``old``, wherever that is named."""
    renamed: Message = json.loads(json.dumps(message).replace(json.dumps(old)[1:-1], new))
    return renamed


if __name__ == "__main__":
    from perfsearch.core.signals import Interrupted, interruptible

    try:
        with interruptible():
            code = main(sys.argv[1:])
    except Interrupted as interrupted:
        code = int(interrupted.exit_code)
    sys.exit(code)
