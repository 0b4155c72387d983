"""Text laid out for a width: words wrapped, cards and tables. No line is broken within a word.

A word that is longer than the width, such as a path, stands alone on a line that is longer.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfsearch.pipeline.cards import Card

LEAST_WIDTH = 60
"""Narrower terminals are written to as if they were so wide."""

_GAP = "  "
_LEAST_TEXT = 24
"""The last column has a line of its own where less than that is left for it."""


def screen_width() -> int | None:
    """Columns of the terminal; ``None`` where output goes to a file, whose lines stay whole."""
    if not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, LEAST_WIDTH)


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """The lines of a text, each wrapped by words; what follows the first is indented.

    Args:
        text: one line or several.
        width: of the screen; ``None``: there is none to keep to.
        indent: columns that continuations begin with, beside those of the line itself.

    """
    lines: list[str] = []
    for line in text.split("\n"):
        if width is None or len(line) <= width:
            lines.append(line)
            continue
        own = len(line) - len(line.lstrip())
        lines += textwrap.wrap(
            line.strip(),
            width,
            initial_indent=" " * own,
            subsequent_indent=" " * (own + indent),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return lines


def card_lines(card: Card, width: int | None) -> Iterator[str]:
    """A card's title, and its rows with their labels in a column."""
    yield _rule(card.title, width)
    label_width = max((len(row.label) for row in card.rows), default=0)
    for row in card.rows:
        head = f"{_GAP}{row.label:{label_width}}{_GAP}"
        room = None if width is None else max(width, LEAST_WIDTH) - len(head)
        lines = _command(row.text, room) if row.is_command else wrapped(row.text, room)
        for place, line in enumerate(lines):
            yield f"{head if place == 0 else ' ' * len(head)}{line}".rstrip()


def _rule(title: str, width: int | None) -> str:
    line = f"-- {title} "
    return line + "-" * max(0, (width or 100) - len(line))


def _command(text: str, room: int | None) -> list[str]:
    """A command over several lines as a shell takes them."""
    if room is None:
        return [text]
    lines = wrapped(text, room - 2, indent=2)
    if len(lines) > 1 and not _same_words(lines, text):  # quoted blanks: it stays in one piece
        return [text]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _same_words(lines: Sequence[str], text: str) -> bool:
    import shlex

    try:
        return shlex.split(" ".join(lines)) == shlex.split(text) and not any(
            line.count("'") % 2 or line.count('"') % 2 for line in lines
        )
    except ValueError:
        return False


def table_lines(rows: Sequence[Sequence[str]], width: int | None, left: int = 1) -> Iterator[str]:
    """Rows of text, the first being the header; numbers to the right, the last column wrapped.

    Args:
        rows: as many cells in each.
        width: of the screen.
        left: so many columns, and the last one, are flush left; the others are numbers.

    Where the columns are too many for the screen, the last of them go into the last one.

    """
    widths = _widths(rows)
    while width is not None and len(widths) > 1 and _total(widths) > width:
        rows = [[*row[:-2], _GAP.join(filter(None, row[-2:]))] for row in rows]
        widths = _widths(rows)
    for row in rows:
        yield from row_lines(row, widths, width, left)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    columns = zip(*(row[:-1] for row in rows), strict=True)
    return [max(map(len, column), default=0) for column in columns]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def row_lines(
    cells: Sequence[str], widths: Sequence[int], width: int | None, left: int = 1
) -> list[str]:
    """One row with its columns so wide; the last one is wrapped, or has lines of its own."""
    padded = [
        cell.ljust(wide) if place < left else cell.rjust(wide)
        for place, (cell, wide) in enumerate(zip(cells[:-1], widths, strict=True))
    ]
    head, last = _GAP.join(padded), cells[-1]
    line = f"{head}{_GAP}{last}".rstrip()
    if width is None or len(line) <= width:
        return [line]
    room = width - len(head) - len(_GAP)
    if room >= _LEAST_TEXT:
        first, *more = wrapped(last, room)
        return [f"{head}{_GAP}{first}", *(" " * (len(head) + 2) + text for text in more)]
    return [head.rstrip(), *(" " * 4 + text for text in wrapped(last, width - 4))]
