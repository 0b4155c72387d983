"""What failed ranks, their launcher and the kernel leave behind."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsearch.workers.failures import ProcessEnd, signal_name
from perfsearch.workers.messages import LAUNCHER_REPORT, RankError, rank_error_file, rank_log

_TAIL_BYTES = 16_384
_PROBE_BYTES = 8_192  # what a rank may need to write down why it failed

_KILL_COUNTS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
    "/proc/vmstat",
)


@dataclass(frozen=True)
class Leavings:
    """Files that ranks leave in a trial's log directory.

    Attributes:
        directory: the log directory.
        world_size: number of ranks.

    """

    directory: Path
    world_size: int

    def clear(self) -> None:
        """Remove the errors of an earlier attempt."""
        for rank in range(self.world_size):
            rank_error_file(self.directory, rank).unlink(missing_ok=True)

    def errors(self) -> list[RankError]:
        """Exceptions that ranks wrote down."""
        found = []
        for rank in range(self.world_size):
            path = rank_error_file(self.directory, rank)
            if path.exists():
                with contextlib.suppress(ValueError):  # its rank died while writing
                    found.append(RankError(**json.loads(path.read_text())))
        return found

    def cannot_be_written(self) -> str:
        """Why nothing more can be written beside the logs, such as a full disk; empty if it can."""
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"0" * _PROBE_BYTES)
                file.flush()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def tails(self) -> dict[int, str]:
        """The end of each rank's log."""
        tails = {}
        for rank in range(self.world_size):
            path = rank_log(self.directory, rank)
            if path.exists():
                with path.open("rb") as log:
                    log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    tails[rank] = log.read().decode(errors="replace")
        return tails


def launcher_report(directory: Path, code: int | None) -> tuple[list[ProcessEnd], str]:
    """How ranks ended, and why the launcher failed where it was not for a rank.

    Args:
        directory: the group's directory.
        code: the launcher's exit code; ``None`` where it still runs.

    """
    path = directory / LAUNCHER_REPORT
    if path.exists():
        report: dict[str, Any] = json.loads(path.read_text())
        ends = [ProcessEnd(**end) for end in report["failures"]]
        error = report["error"]
        return ends, f"{error['type']}: {error['message']}" if error else ""
    if code is not None and code < 0:
        return [], f"it was ended by {signal_name(-code)}"
    return [], ""


def oom_kills() -> int:
    """Processes that the OOM killer has ended so far, in this cgroup or on this host."""
    for path in _KILL_COUNTS:
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0
