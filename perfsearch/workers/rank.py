"""A rank, forked by torch's launcher.

It imports torch and perfsearch's own rank side, nothing of what the controller needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.workers import progress
from perfsearch.workers.channel import Channel
from perfsearch.workers.messages import (
    SOCKET_FILE,
    RankError,
    Startup,
    rank_error_file,
    rank_log,
)
from perfsearch.workers.standing import answer
from perfsearch.workers.watch import watch_controller

if TYPE_CHECKING:
    from perfsearch.workers.loop import Loop


def switch_log(directory: str, rank: int) -> None:
    """Send everything that this process and its children write to the rank's log there."""
    path = rank_log(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def report_error(directory: str, rank: int, error: BaseException, phase: str) -> RankError:
    """Leave the exception beside the rank's log, and in the log."""
    text = "".join(traceback.format_exception(error))
    record = RankError(
        rank=rank,
        time=time.time(),
        type=type(error).__name__,
        message=str(error),
        traceback=text,
        phase=phase,
        nearly_full=_nearly_full(),
        log=str(rank_log(directory, rank)),
    )
    print(text, file=sys.stderr, flush=True)
    rank_error_file(directory, rank).write_text(json.dumps(asdict(record)))
    return record


def _nearly_full() -> bool | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the device is past answering, which says nothing of its memory
        return None
    return bool(free < 0.02 * total)


def main(directory: Path) -> int:
    """Serve trials until told to stop."""
    progress.begin()
    rank = int(os.environ["RANK"])
    startup = Startup.read(directory)
    switch_log(startup.log_directory, rank)
    answer(directory, rank)
    watch_controller(startup, directory)
    leads = startup.leads and os.environ["LOCAL_RANK"] == "0"
    channel = Channel.connect(directory / SOCKET_FILE) if leads else None
    try:
        loop = _make_loop(directory, startup, rank, channel)
        loop.introduce()
    except Exception as error:
        report_error(startup.log_directory, rank, error, "start")
        return 1
    return loop.serve()


def own_thread_pool() -> None:
    """Make torch's thread pool anew, as a fork leaves it without threads.

    Otherwise the threads of the first backward pass do so, one for each GPU and all at once, and
    the process is aborted when two of them meet: ``Invalid thread pool!`` (pytorch#178535).
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _make_loop(directory: Path, startup: Startup, rank: int, channel: Channel | None) -> Loop:
    import torch

    from perfsearch.workers.bootstrap import Groups
    from perfsearch.workers.loop import Loop
    from perfsearch.workers.trainer import Trainer

    own_thread_pool()
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    groups = Groups(startup.spec, directory, rank, local_rank, world_size)
    groups.leads = channel is not None
    groups.share_spec()
    if groups.spec.device == "cuda":
        groups.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(groups.device)
    return Loop(Trainer(groups), channel, startup)


def serve(directory: str) -> None:
    """What torch's launcher calls in each rank; it returns once the controller says so.

    Raises:
        SystemExit: the rank failed.
    """
    # The launcher's handlers came along with the fork; a rank that waits in a collective would
    # never run them, and its peers' death could not end it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    code = main(Path(directory))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # taking torch's modules down costs a second and frees nothing
