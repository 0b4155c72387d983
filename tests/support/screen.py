"""What a command leaves on a terminal of some width, as a person scrolls through it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+|\x1b")


@dataclass
class Screen:
    """The lines of a terminal that is as long as need be, by what was written to it.

    Attributes:
        width: columns; a longer line is kept in one piece, so that it can be seen to be longer.
        lines: what stands on it.

    """

    width: int
    lines: list[str] = field(default_factory=lambda: [""])
    _row: int = 0
    _column: int = 0

    def write(self, text: str) -> None:
        """Take what a program writes: text, line ends, and the sequences that redraw a block."""
        for piece in _PIECES.finditer(text):
            if piece[2]:
                self._steer(piece[1], piece[2])
            elif piece[0] == "\r":
                self._column = 0
            elif piece[0] == "\n":
                self._row += 1
                while len(self.lines) <= self._row:
                    self.lines.append("")
            elif piece[0] != "\x1b":
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = (
                    line[: self._column] + piece[0] + line[self._column + len(piece[0]) :]
                )
                self._column += len(piece[0])

    def _steer(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif letter == "K":
            kept = "" if numbers == "2" else self.lines[self._row][: self._column]
            self.lines[self._row] = kept

    @property
    def text(self) -> str:
        """All of it, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.lines).strip("\n")


def shown(
    command: Sequence[str], width: int, directory: str | os.PathLike[str], **variables: str
) -> tuple[int, str]:
    """Run a command in a terminal of that width; its exit code, and what stands on the screen."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    without = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment: Mapping[str, str] = {**without, "TERM": "xterm", **variables}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, cwd=directory, env=environment
    )
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(leader)
    screen = Screen(width)
    screen.write(written.decode(errors="replace"))
    return process.wait(), screen.text
