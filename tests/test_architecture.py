"""``docs/architecture.md`` names what is there, in the order that the tools hold."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "perfsearch"


def test_every_room_has_its_row_and_names_files_that_exist():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", PAGE, flags=re.M)
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert {room for room, _ in rows} == rooms
    missing = [
        f"{room}/{file}"
        for room, files in rows
        for file in re.findall(r"`([\w/]+\.py)`", files)
        if not (PACKAGE / room / file).is_file()
    ]
    assert missing == []


def test_every_file_of_the_page_exists():
    named = re.findall(r"`(?:perfsearch/)?((?:\w+/)*\w+\.(?:py|html\.jinja))`", PAGE)
    places = [PACKAGE, *(p.parent for p in PACKAGE.glob("*/__init__.py"))]
    missing = [n for n in named if not any((place / n).is_file() for place in places)]
    assert len(named) > 40
    assert missing == []


def test_the_picture_has_the_order_that_the_linter_holds():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    wanted = [sorted(re.findall(r"perfsearch\.(\w+)", layer)) for layer in layers]
    picture = PAGE.partition("```")[2].partition("```")[0]
    names = {name for layer in wanted for name in layer}
    boxes = re.split(r"[├┌└][─┬┴┼]+[┤┐┘]", picture)
    drawn = [sorted(names & set(re.findall(r"(\w+) {3}", box))) for box in boxes if "│" in box]
    assert drawn == wanted
