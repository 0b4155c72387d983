"""NVLink throughput, from the totals that ``nvidia-smi`` prints.

NVML's own call for them, ``nvmlDeviceGetFieldValues``, broke the calling process's memory (seen
with driver 580.159.04 on H100), so they are read in a process of their own, now and then.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from perfsearch.metrics.guard import Guard
from perfsearch.metrics.nvml import Device

EVERY_S = 15.0
"""Between two readings: each takes a fraction of a second of one core."""

_LONGEST_S = 10.0
_KIB = 1024.0
_MEGA = 1e6
_CARD = re.compile(r"^GPU \d+:.*\(UUID: (GPU-[0-9a-fA-F-]+)\)")
_LINK = re.compile(r"Link \d+: Data (Tx|Rx): (\d+) KiB")

Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


def totals_kib(text: str) -> dict[str, tuple[float, float]]:
    """Sent and received by card's UUID, summed over its links; cards without links are left out."""
    found: dict[str, tuple[float, float]] = {}
    card = ""
    for line in text.splitlines():
        if named := _CARD.match(line):
            card = named[1]
        elif (link := _LINK.search(line)) and card:
            sent, received = found.get(card, (0.0, 0.0))
            kib = float(link[2])
            found[card] = (sent + kib, received) if link[1] == "Tx" else (sent, received + kib)
    return found


class NvlinkReader:
    """Turns readings into rates; never waits for the process that reads.

    Args:
        devices: the job's GPUs; with fewer than two there is nothing to see.
        guard: keeps why it cannot be read.
        clock: monotonic seconds.
        start: starts a command; for tests.

    """

    def __init__(
        self,
        devices: Sequence[Device],
        guard: Guard,
        clock: Callable[[], float] = time.monotonic,
        start: Start | None = None,
    ) -> None:
        self._devices = {d.uuid: d.index for d in devices if not d.is_mig}
        self._guard = guard
        self._clock = clock
        self._start = start or _start
        self._running: tuple[float, subprocess.Popen[str]] | None = None
        self._last: tuple[float, dict[str, tuple[float, float]]] | None = None
        self._rates: dict[str, float] = {}
        self._usable = len(self._devices) > 1

    def rates(self) -> dict[str, float]:
        """The rates between the latest two readings, by ``gpu_<index>_nvlink_...``."""
        if self._usable:
            self._guard.read("nvlink", self._advance)
            self._usable = "nvlink" not in self._guard.unsupported
        return self._rates if self._usable else {}

    def close(self) -> None:
        """End a reading that is under way."""
        running, self._running = self._running, None
        if running is not None:
            running[1].kill()
            running[1].communicate()

    def _advance(self) -> None:
        now = self._clock()
        if self._running is None:
            if self._last is None or now - self._last[0] >= EVERY_S:
                self._running = (now, self._start(_command(list(self._devices))))
            return
        since, process = self._running
        if process.poll() is None:
            if now - since > _LONGEST_S:
                self.close()
                raise TimeoutError(f"nvidia-smi nvlink took more than {_LONGEST_S:g} s")
            return
        self._running = None
        output = process.communicate()[0]
        totals = totals_kib(output) if process.returncode == 0 else {}
        if not totals:
            words = " ".join(output.split())[:120] or "it shows no links"
            raise OSError(f"nvidia-smi nvlink ended with {process.returncode}: {words}")
        self._take(since, totals)

    def _take(self, time_s: float, totals: dict[str, tuple[float, float]]) -> None:
        if self._last is not None:
            before_s, before = self._last
            for uuid in totals.keys() & before.keys() & self._devices.keys():
                for word, old, new in zip(
                    ("transmit", "receive"), before[uuid], totals[uuid], strict=True
                ):
                    name = f"gpu_{self._devices[uuid]}_nvlink_{word}_megabytes_per_s"
                    self._rates.pop(name, None)
                    if new >= old:
                        self._rates[name] = (new - old) * _KIB / _MEGA / (time_s - before_s)
        self._last = (time_s, totals)


def _command(uuids: Sequence[str]) -> list[str]:
    return ["nvidia-smi", "nvlink", "-gt", "d", "-i", ",".join(uuids)]


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    path = shutil.which(command[0])
    if path is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    return subprocess.Popen(
        [path, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
