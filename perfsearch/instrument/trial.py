"""A script in a rank of a search: its log, its end, and what is left when it fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from perfsearch.instrument.launchers import OwnLauncherError, watch_for_launchers
from perfsearch.instrument.main import run_script, without_our_frames
from perfsearch.instrument.orders import Orders
from perfsearch.instrument.script import Script
from perfsearch.instrument.searched import Finished, Searched
from perfsearch.workers.messages import GroupSpec, Startup
from perfsearch.workers.rank import report_error, switch_log
from perfsearch.workers.standing import answer
from perfsearch.workers.watch import watch_controller


class ScriptExitError(RuntimeError):
    """The script ended itself with an exit code that tells of a failure."""


def run_searched(script: Script, orders: Orders) -> int:
    """Run the script until the controller has seen enough of it; return the exit code."""
    rank = int(os.environ["RANK"])
    switch_log(orders.log_directory, rank)
    answer(orders.directory, rank)
    watch_controller(_startup(orders), Path(orders.directory))
    searched = Searched(script, orders.directory, rank)
    watch_for_launchers(orders.script, _refuse)
    try:
        run_script(orders, sys.argv[2:])
        searched.tell_end()
        return 0
    except Finished:
        return 0
    except SystemExit as error:
        if error.code in (None, 0):
            searched.tell_end()
            return 0
        text = f"the script ended itself with exit code {error.code}"
        _report(ScriptExitError(text), searched, orders, rank)
    except BaseException as error:
        _report(error, searched, orders, rank)
        if rank == 0:
            script.facts().leave(orders.log_directory)
    finally:
        script.loaders.close()
        searched.leave_process_group()
    return 1


def _report(error: BaseException, searched: Searched, orders: Orders, rank: int) -> None:
    error.__traceback__ = without_our_frames(error.__traceback__)
    building = searched.steps == 0 and bool(orders.knobs or orders.mapped)
    report_error(orders.log_directory, rank, error, "build" if building else "train")


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
