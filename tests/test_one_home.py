"""What stands in one place of the package only: whoever needs it takes it from there."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "perfsearch"

HOMES = {
    "the warm-up rule": (r"\bis_steady\(|> 2 \* [\w.]*scored_seconds", {"training/clock.py"}),
    "how many steps are apart": (r"(MIN|MAX)_DISCARDED|^WARMUP_STEPS\b", {"training/clock.py"}),
    "reading a clock's step times": (r"def read_steps\(", {"training/clock.py"}),
    "the start of a timed window": (r"mark\(\"start\"\)", {"training/clock.py"}),
}
"""What is meant, how it looks in a line, and the files that may hold it, below the package."""


@pytest.mark.parametrize("fact", HOMES)
def test_a_fact_has_one_home(fact):
    pattern, homes = HOMES[fact]
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text(), re.MULTILINE)
    }
    assert found == homes
