"""Messages that the page on them quotes are those of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@cache
def texts():
    """Every text of the package, with ``…`` for what is filled in."""
    found = []
    for path in (ROOT / "perfsearch").rglob("*.py"):
        tree = ast.parse(path.read_text())
        formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in formatted for part in node.values}
        found += ["".join(getattr(p, "value", "…") if isinstance(p, ast.Constant) else "…"
                          for p in node.values) for node in formatted]  # fmt: skip
        found += [
            re.sub(r"%[sdrg]", "…", node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
        ]
    return found


def is_said(message):
    """Whether one text of the code has all the pieces of a message, in their order."""
    pieces = [piece.strip() for piece in message.split("…") if piece.strip(" :(),")]
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    return any(pattern.search(text) for text in texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_code(message):
    assert is_said(message)


def test_the_page_quotes_messages_and_others_are_not_found():
    assert len(MESSAGES) > 30
    assert not is_said("waiting for …: the search of process … is using them all")
