"""Stack dumps: where ranks stand when their time is over, asked by a signal, read from their logs.

A rank leaves a note of its process as soon as it would answer. The answer is Python's own
``faulthandler``, which writes the frames of the main thread to the log from within the signal
handler: also where the rank waits in a system call or in a library, and no Python code runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsearch.core.files import write_text
from perfsearch.workers import processes
from perfsearch.workers.messages import rank_log, stack_note_file

ASKING = signal.SIGUSR2
"""The signal that asks a rank where it stands."""

_LOG = 2  # the file descriptor that follows the rank from log to log
_PATIENCE_S = 0.5  # a rank that can answer does so in milliseconds
_POLL_S = 0.03
_MOST_BYTES = 65_536
_MOST_PLACES = 4

_STOPPED = "no line (its process is stopped)"

_HEADER = "(most recent call first):"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_PASSED_OVER = re.compile(
    r"^<"
    r"|/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)"
    r"|/(?:site|dist)-packages/torch/"
    r"|/perfsearch/instrument/"
    r"|/perfsearch/runners/deepspeed/hook\.py"
    r"|/perfsearch/runners/deepspeed/path/"
    r"|/perfsearch/training/clock\.py"
)
"""Files of Python, of torch, and what stands between a script and torch."""


def answer_stack_requests(directory: str | Path, rank: int) -> None:
    """Let this process, rank ``rank``, write where it stands to its log whenever it is asked.

    Not where something answers to the signal already. Once the user's code takes the signal for
    itself, the note is gone and nobody asks: its handler may save or end the whole job.

    Args:
        directory: of the group.
        rank: which rank this is.

    """
    own = os.getpid()
    if catches_stack_request(own) or signal.getsignal(ASKING) is not signal.SIG_DFL:
        return
    faulthandler.register(ASKING, file=_LOG, all_threads=False, chain=False)
    note = stack_note_file(directory, rank)
    _withdraw_when_taken(note)
    write_text(note, json.dumps({"pid": own, "started": processes.started_at(own)}))


def _withdraw_when_taken(note: Path) -> None:
    original, own = signal.signal, os.getpid()

    @functools.wraps(original)
    def setting(signalnum: Any, handler: Any) -> Any:
        if signalnum == ASKING and os.getpid() == own:
            note.unlink(missing_ok=True)
        return original(signalnum, handler)

    signal.signal = setting


def catches_stack_request(pid: int) -> bool:
    """Whether the process handles ``ASKING`` and lets it come, so that it does not end by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = dict(re.findall(r"^(Sig\w+):\s*([0-9a-f]+)$", status, re.MULTILINE))
    caught, blocked = (int(found.get(mask, "0"), 16) for mask in ("SigCgt", "SigBlk"))
    return bool((caught & ~blocked) >> (ASKING - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal, so that it answers to none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in ("T", "t")


@dataclass(frozen=True)
class _Asked:
    pid: int
    log: Path
    begin: int

    def said(self) -> str:
        """What the rank's log has got since it was asked."""
        with self.log.open("rb") as log:
            log.seek(self.begin)
            return log.read(_MOST_BYTES).decode(errors="replace")


def ask_for_stacks(directory: Path, log_directory: Path, world_size: int) -> dict[int, str]:
    """Ask the ranks on this host where they stand, and wait a moment for what they say.

    Args:
        directory: of the group.
        log_directory: where the ranks log now.
        world_size: number of ranks.

    Returns:
        The places by rank, of those that told or are stopped.

    """
    asked = {}
    for rank in range(world_size):
        pid, log = _process(directory, rank), rank_log(log_directory, rank)
        if pid is None or not log.exists():
            continue
        asked[rank] = _Asked(pid, log, log.stat().st_size)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASKING)
    said: dict[int, str] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while asked and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, said = said, {rank: one.said() for rank, one in asked.items()}
        if said == before and all(_HEADER in text for text in said.values()):
            break
    places = {rank: innermost_line(text) for rank, text in said.items()}
    stopped = {rank: _STOPPED for rank, one in asked.items() if is_stopped(one.pid)}
    return {rank: found for rank, found in {**places, **stopped}.items() if found}


def _process(directory: Path, rank: int) -> int | None:
    try:
        note = json.loads(stack_note_file(directory, rank).read_text())
    except OSError:
        return None
    pid = int(note["pid"])
    return pid if processes.is_alive(pid, note["started"]) and catches_stack_request(pid) else None


def innermost_line(text: str) -> str:
    """The innermost line that is neither Python's nor torch's; failing that, the innermost.

    Args:
        text: a log that ``faulthandler`` has written to; only its last words count.

    Returns:
        Such as ``train.py:88 in step``; empty where nothing was told.

    """
    _, header, frames = text.rpartition(_HEADER)
    found = _FRAME.findall(frames) if header else []
    if not found:
        return ""
    path, line, function = next((f for f in found if not _PASSED_OVER.search(f[0])), found[0])
    return f"{os.path.basename(path)}:{line} in {function}"


def in_words(places: Mapping[int, str]) -> str:
    """The places in one line, ranks at the same one together; empty where there are none."""
    together: dict[str, list[int]] = {}
    for rank in sorted(places):
        together.setdefault(places[rank], []).append(rank)
    parts = [f"{_named(ranks)} at {where}" for where, ranks in together.items()][:_MOST_PLACES]
    if not parts:
        return ""
    stand = "stands" if len(next(iter(together.values()))) == 1 else "stand"
    parts[0] = parts[0].replace(" at ", f" {stand} at ", 1)
    if len(together) > _MOST_PLACES:
        parts.append(f"others at {len(together) - _MOST_PLACES} more places")
    return ", ".join(parts)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
