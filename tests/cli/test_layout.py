"""Words wrapped, cards and tables at several widths."""

import shlex
import sys
from types import SimpleNamespace

import pytest

from perfsearch.cli.layout import card_lines, screen_width, table_lines, wrapped
from perfsearch.pipeline.cards import Card, Row

TEXT = "search: 70 configurations are too many to try all: optimizer_implementation=fused wins"
COMMAND = "perfsearch runner=ddp 'runner.knobs.bucket_cap_mb=[8, 25]' budget.trials=50 seed=1"
ROWS = [
    ["", "trial", "gain", "differs"],
    ["baseline", "0", "", ""],
    ["best", "12", "+50.1%", "bucket_cap_mb=64 optimizer_implementation=fused static_graph=true"],
]


@pytest.mark.parametrize("width", [60, 80, 160, None])
def test_no_line_is_wider_and_no_word_is_broken(width):
    lines = wrapped(TEXT, width, indent=2)
    assert " ".join(line.strip() for line in lines) == TEXT
    assert all(len(line) <= (width or 1000) for line in lines)
    table = list(table_lines(ROWS, width))
    assert all(len(line) <= (width or 1000) for line in table)
    assert set(ROWS[2][3].split()) <= set(" ".join(table).split())


def test_what_is_longer_than_the_screen_stands_alone():
    path = "/a" * 50
    assert wrapped(f"see {path} for more", 60) == ["see", path, "for more"]


@pytest.mark.parametrize("width", [60, 100, None])
def test_a_command_on_a_card_can_be_pasted(width):
    card = Card("result", [Row("verdict", TEXT), Row("use it", COMMAND, is_command=True)])
    title, *lines = card_lines(card, width)
    assert title.startswith("-- result ---") and len(title) == (width or 100)
    place = next(i for i, line in enumerate(lines) if line.startswith("  use it   "))
    pasted = "\n".join(line[11:] for line in lines[place:])
    assert shlex.split(pasted.replace("\\\n", "")) == shlex.split(COMMAND)


@pytest.mark.parametrize(
    ("terminal", "columns", "width"), [(True, "132", 132), (True, "20", 60), (False, "132", None)]
)
def test_lines_are_as_wide_as_a_terminal_and_whole_in_a_file(monkeypatch, terminal, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    assert screen_width() == width
