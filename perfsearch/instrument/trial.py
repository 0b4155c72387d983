"""A script in a rank of a search: its log, its end, and what is left when it fails."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.instrument.finished import Finished
from perfsearch.instrument.launchers import OwnLauncherError, watch_for_launchers
from perfsearch.instrument.main import attach_at_import, run_script, without_our_frames
from perfsearch.instrument.orders import Orders
from perfsearch.instrument.sockets import socket_path
from perfsearch.workers.channel import Channel
from perfsearch.workers.devices import GroupSpec
from perfsearch.workers.messages import Startup
from perfsearch.workers.rank import report_error, switch_log
from perfsearch.workers.standing import answer
from perfsearch.workers.watch import watch_controller

if TYPE_CHECKING:
    from perfsearch.instrument.searched import Searched


class ScriptExitError(RuntimeError):
    """The script ended itself with an exit code that tells of a failure."""


class _Rank:
    """A rank whose instruments are made when the script has imported torch, or when it ends."""

    def __init__(self, orders: Orders, rank: int) -> None:
        self.orders = orders
        self.rank = rank
        self.searched: Searched | None = None
        self._channel = Channel.connect(socket_path(orders.directory, rank))
        self._channel.send({"event": "hello", "pid": os.getpid()})

    def attach(self) -> Searched:
        """Make the instruments, unless there are some."""
        importlib.import_module("torch")  # where it has not been, they come with it
        if self.searched is None:
            from perfsearch.instrument.script import Script
            from perfsearch.instrument.searched import Searched

            script = Script(self.orders.knobs)
            self.searched = Searched(script, self._channel, self.rank)
        return self.searched

    def report(self, error: BaseException) -> None:
        """Leave what the script failed of where the controller looks for it."""
        error.__traceback__ = without_our_frames(error.__traceback__)
        begun = self.searched is not None and self.searched.steps > 0
        building = not begun and bool(self.orders.knobs or self.orders.mapped)
        report_error(self.orders.log_directory, self.rank, error, "build" if building else "train")


def run_searched(orders: Orders) -> int:
    """Run the script until the controller has seen enough of it; return the exit code."""
    rank = int(os.environ["RANK"])
    switch_log(orders.log_directory, rank)
    answer(orders.directory, rank)
    watch_controller(_startup(orders), Path(orders.directory))
    here = _Rank(orders, rank)
    attach_at_import(here.attach)
    watch_for_launchers(orders.script, _refuse)
    try:
        run_script(orders, sys.argv[2:])
        here.attach().tell_end()
        return 0
    except Finished:
        return 0
    except SystemExit as error:
        if error.code in (None, 0):
            here.attach().tell_end()
            return 0
        text = f"the script ended itself with exit code {error.code}"
        here.report(ScriptExitError(text))
    except BaseException as error:
        here.report(error)
        if rank == 0 and here.searched is not None:
            here.searched.facts().leave(orders.log_directory)
    finally:
        if here.searched is not None:
            here.searched.close()
    return 1


def _refuse(text: str) -> None:
    raise OwnLauncherError(text)


def _startup(orders: Orders) -> Startup:
    return Startup(
        GroupSpec(workload={}, device="", nproc=1),
        orders.token,
        orders.controller_pid,
        orders.controller_started,
        orders.log_directory,
    )
