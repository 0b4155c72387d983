"""``CASES.md`` says which test holds which public report off: here it is held to its word."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests" / "CASES.md").read_text()
CASES = 66
ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n").split("|"))
    for line in TEXT.splitlines()
    if re.match(r"\| [A-J]\d+ \|", line)
]
TAKEN = [row for row in ROWS if "::" in row[2]]
_REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+|#\d+")


def reports(text: str) -> set[str]:
    """``owner/name#1, #2`` as whole names."""
    found, last = set(), ""
    for report in _REPORT.findall(text):
        last = report.partition("#")[0] or last
        found.add(f"{last}#{report.partition('#')[2]}")
    return found


@pytest.mark.parametrize(("case", "listed", "test"), TAKEN, ids=lambda value: value[:60])
def test_the_named_test_exists_and_names_the_reports(case: str, listed: str, test: str) -> None:
    path, _, function = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    found = [n for n in functions if n.name == function]
    assert len(found) == 1, f"{case}: {test} does not exist, or twice"
    docstring = ast.get_docstring(found[0]) or ""
    missing = reports(listed) - reports(docstring)
    assert not missing, f"{case}: {test} does not name {sorted(missing)}"
    assert reports(listed) or listed in docstring


def test_every_case_is_taken_or_left_out_with_a_reason() -> None:
    taken = {row[0] for row in TAKEN}
    left_out = {row[0] for row in ROWS if "::" not in row[2]}
    assert not taken & left_out
    assert len(taken | left_out) == CASES
    assert all(len(row[2]) > 20 for row in ROWS)


def test_shorthand_is_understood() -> None:
    assert reports("a/b#1, #2 and c/d.e#3") == {"a/b#1", "a/b#2", "c/d.e#3"}
