"""A rank's log: all that it prints, how far it has come, and the error that it died of."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict

from perfsearch.core.files import private
from perfsearch.workers.failures import is_out_of_memory
from perfsearch.workers.messages import RankError, rank_error_file, rank_log

_begun = time.monotonic()


def begin() -> None:
    """Count from here: a rank begins."""
    global _begun
    _begun = time.monotonic()


def note(what: str) -> None:
    """Say what has been done, and how long after ``begin``."""
    print(f"[{time.monotonic() - _begun:.2f} s] {what}", flush=True)


def switch_log(directory: str, rank: int) -> None:
    """Send everything that this process and its children write to the rank's log there."""
    path = rank_log(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
        out_of_memory=is_out_of_memory(error, _nearly_full()),
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
