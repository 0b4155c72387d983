"""A row of a table of measurements: its cells as values, and errors that say where they stand."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfsearch.core.knob import Value
from perfsearch.core.suggest import nearest
from perfsearch.core.trial import Status

_EXPECTED = "Name a CSV file of measured configurations, such as a search's trials.csv."


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        path: the table's file.
        number: of its line, as editors and spreadsheets count: the header is 1.
        cells: text by column; ``None`` where the row is too short.

    """

    path: Path
    number: int
    cells: Mapping[str, str | None]

    def text(self, column: str) -> str:
        """A cell's text; empty where there is none."""
        return (self.cells.get(column) or "").strip()

    @property
    def status(self) -> Status:
        """How the visit ended; ``ok`` where the row does not tell.

        Raises:
            ValueError: there is no such status.

        """
        word = self.text("status") or str(Status.OK)
        try:
            return Status(word)
        except ValueError as error:
            raise self.refusal("status", nearest(word, Status)) from error

    def value(self, column: str) -> Value:
        """A knob's value: null, a truth value, a number, or a word."""
        word = self.text(column)
        if word.lower() in ("", "none", "null"):
            return None
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        for number in (int, float):
            try:
                return number(word)
            except ValueError:
                continue
        return word

    def numbers(self, column: str) -> list[float]:
        """Numbers apart by blanks.

        Raises:
            ValueError: something else is among them.

        """
        try:
            return [float(word) for word in self.text(column).split()]
        except ValueError as error:
            raise self.refusal(column, "A number is needed, or several apart by blanks.") from error

    def positive(self, column: str) -> list[float]:
        """The same, where nothing else than positive numbers makes sense.

        Raises:
            ValueError: one of them is zero, negative, infinite or no number.

        """
        found = self.numbers(column)
        if not all(0 < number < math.inf for number in found):
            raise self.refusal(column, "It is not positive, or not finite.")
        return found

    def refusal(self, column: str, reason: str) -> ValueError:
        """The error for a cell that cannot be used."""
        shown = self.text(column)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        where = f"runner.table={self.path}, row {self.number}, column {column}"
        return ValueError(f"{where}: {shown!r}. {reason}")


def read_rows(path: Path) -> tuple[str, list[str], Iterator[Row]]:
    """The text of a CSV file, its columns, and its rows in order.

    Raises:
        ValueError: it cannot be read, or is no CSV file; also while rows are taken.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"runner.table={path}: it cannot be read ({error.strerror}). {_EXPECTED}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"runner.table={path}: it is no text in UTF-8 (byte {error.start}). {_EXPECTED}"
        ) from error
    reader = csv.DictReader(text.splitlines())
    return text, _columns(reader, path), _rows(reader, path)


def _columns(reader: csv.DictReader[str], path: Path) -> list[str]:
    try:
        return list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(f"runner.table={path}: {error}. {_EXPECTED}") from error


def _rows(reader: csv.DictReader[str], path: Path) -> Iterator[Row]:
    try:
        for cells in reader:
            yield Row(path, reader.line_num, cells)
    except csv.Error as error:
        place = f"runner.table={path}, row {reader.line_num}"
        raise ValueError(f"{place}: {error}. {_EXPECTED}") from error
