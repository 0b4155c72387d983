"""A rank of a DeepSpeed job: its log, its end, and the moment in which it imports DeepSpeed.

Nothing heavy is imported before the job does so itself: a script may set variables first that
torch or DeepSpeed read when they are imported.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from perfsearch.instrument.patching import after_import
from perfsearch.runners.deepspeed.request import (
    Request,
    ended_file,
    result_file,
    so_far_file,
    torch_logs_file,
    write_whole,
)

if TYPE_CHECKING:
    from perfsearch.runners.deepspeed.hook import Hook


class Rank:
    """What is known of this process before and after DeepSpeed is there.

    Args:
        request: the trial.
        rank: of this process.

    Attributes:
        phase: ``start``, ``build`` (inside ``deepspeed.initialize``) or ``train``.
        finished: whether the trial's result is written.
        steps: global steps so far.
        at_first_step: called when the first of them is made.

    """

    def __init__(self, request: Request, rank: int) -> None:
        self.request = request
        self.rank = rank
        self.phase = "start"
        self.finished = False
        self.steps = 0
        self.at_first_step: Callable[[], None] = lambda: None
        self.hook: Hook | None = None

    def imported(self, module: ModuleType) -> None:
        """Wrap what is needed of DeepSpeed, which the job has just imported."""
        from perfsearch.runners.deepspeed.hook import Hook

        self.hook = Hook(self, module)

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Leave the exception that ends this rank where the controller looks for it."""
        from perfsearch.workers.log import report_error

        report_error(self.request.log_directory, self.rank, error, self.phase)

    def ended(self) -> None:
        """Say how far a script came that ended before the trial did; what was measured counts."""
        so_far = so_far_file(self.request.log_directory, self.rank)
        if self.finished:
            return
        if so_far.exists():
            so_far.rename(result_file(self.request.log_directory, self.rank))
        else:
            write_whole(
                ended_file(self.request.log_directory, self.rank),
                {"steps": self.steps, "phase": self.phase},
            )


def enter_trial(path: str, rank: int) -> None:
    """Take part in the trial that the file at ``path`` describes."""
    from perfsearch.instrument.seeds import seed_process
    from perfsearch.workers.log import switch_log
    from perfsearch.workers.messages import TOKEN_VARIABLE, keep_worker_sockets, stack_note_file
    from perfsearch.workers.processes import watch_controller
    from perfsearch.workers.stack_dumps import answer_stack_requests

    me = Rank(Request.read(path), rank)
    switch_log(me.request.log_directory, rank)
    directory = me.request.directory
    if not directory:
        raise ValueError(f"{path} names no directory of a group, which would be removed at its end")
    after_import("multiprocessing.process", lambda module: keep_worker_sockets(directory))
    if not stack_note_file(directory, rank).exists():  # else a process that the rank has started
        answer_stack_requests(directory, rank)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    above = Path(error_file).parents if error_file else ()  # DIRECTORY/RUN/ATTEMPT/RANK/error.json
    if rank == 0 and len(above) > 3:  # unless it is the user's own
        write_whole(
            torch_logs_file(me.request.log_directory), {"directory": str(above[3].resolve())}
        )
    watch_controller(*me.request.controller, os.environ[TOKEN_VARIABLE], Path(directory))
    seed_process(me.request.seed, rank)
    if me.request.undo:
        from perfsearch.instrument.files import keep_files

        me.at_first_step = keep_files(me.request.undo, [directory]).first_step
    sys.excepthook = me.failed
    atexit.register(me.ended)
    after_import("deepspeed", me.imported)


def keep_store_here() -> None:
    """Have the store of ranks that meet on this host listen here alone, once torch is there."""

    def imported(torch: ModuleType) -> None:
        from perfsearch.instrument.store import listen_on_loopback

        listen_on_loopback()

    after_import("torch", imported)
