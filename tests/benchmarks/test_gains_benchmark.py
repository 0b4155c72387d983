"""The benchmark over scripts as people have them: its grids, its starts, and its tables."""

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from _gain_cases import CASES, SCRIPTS  # noqa: E402
from _gain_report import report  # noqa: E402
from _handed_over import ENDLESS, shortened, without_perfsearch  # noqa: E402
from _watched import watched  # noqa: E402

PLAIN = [case for case in CASES if case.steps_argument == "--steps"]


def test_no_script_knows_perfsearch():
    assert {file.stem for file in SCRIPTS.glob("*.py")} == {case.name for case in CASES}
    assert not [file for file in SCRIPTS.glob("*.py") if "perfsearch" in file.read_text()]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_a_script_has_the_options_of_its_grid(case):
    text = (SCRIPTS / f"{case.name}.py").read_text()
    words = " ".join([case.arguments, case.small, *case.reordered, *case.altering]).split()
    assert [w for w in words if w.startswith("--") and f'"{w}"' not in text] == []
    assert not [o for o, _ in case.grid(small=True) if "compile" in o]


SLEEPS = "import time; time.sleep(600)"


def starts(code):
    """Python that starts other Python in a session of its own, and prints its process id."""
    return (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
    )


def runs(pid):
    """Whether a process is there that is not just waiting to be collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_start_is_ended_at_its_time_with_what_it_has_started(tmp_path):
    command = starts(SLEEPS) + "import time; time.sleep(600)"
    ended = watched([sys.executable, "-c", command], tmp_path, os.environ, tmp_path / "log", 3.0)
    assert ended.rc is None
    child = int(ended.lines[0])
    for _ in range(100):  # killed is not yet gone
        if not runs(child):
            break
        time.sleep(0.1)
    assert not runs(child)


def test_what_a_start_leaves_behind_is_counted(tmp_path):
    command = starts(SLEEPS) + "sys.exit(3)"
    ended = watched([sys.executable, "-c", command], tmp_path, os.environ, tmp_path / "log", 60.0)
    assert (ended.rc, ended.left, len(ended.lines)) == (3, 1, 1)


def test_a_hand_over_is_shortened_where_it_is_endless(tmp_path):
    apply = tmp_path / "best" / "apply"
    apply.mkdir(parents=True)
    (apply / "run.sh").write_text(f"#!/bin/sh\npython train.py --steps {ENDLESS}\n")
    assert shortened(tmp_path, 40).read_text().endswith("python train.py --steps 40\n")
    (apply / "run.sh").write_text("#!/bin/sh\npython train.py\n")
    with pytest.raises(RuntimeError, match=ENDLESS):
        shortened(tmp_path, 40)


def test_python_is_ours_and_perfsearch_is_not_there(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    alone = without_perfsearch(tmp_path / "alone", environment)
    says = "import sys; print(sys.executable); import perfsearch"
    ended = watched(["python", "-c", says], tmp_path, alone, tmp_path / "log", 60.0)
    assert ended.lines[0] == sys.executable
    assert ended.lines[-1] == "ImportError: perfsearch is not here"


def start(options, rate, part="grid", **values):
    found = {"part": part, "key": "gpt", "options": options, "rate": rate, "rc": 0}
    return {**found, "seconds": 30.0, "altering": False, "lines": ["the end"], **values}


def searched(ratio, is_baseline=False, **values):
    speed_up = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "pairs": 3}
    told = {"verdict": "so it is", "is_baseline": is_baseline, "speed_up": speed_up, "trial": 1}
    trials = [
        {"number": number, "purpose": purpose, "differs": differs, "baseline": not differs,
         "status": "ok", "reason": "a | b", "objective": 100.0, "seconds": 9.0}
        for number, purpose, differs in ((0, "baseline", {}), (1, "search", {"pin_memory": True}))
    ]  # fmt: skip
    found = {"part": "search", "key": "gpt", "rc": 0, "seconds": 300.0, "words": "", "lines": []}
    return {**found, "summary": told, "trials": trials, **values}


GRID = [
    start("", 90.0),
    start("--fast", 150.0),
    start("--slow", None, rc=None, lines=["still compiling"]),
    start("--bf16", 300.0, altering=True),
    start("", 110.0),
]


def row_of(records):
    page = report(records)
    row = next(line for line in page.splitlines() if line.startswith("| `gpt`"))
    return page, [cell.strip() for cell in row.strip("|").split("|")]


def test_a_gain_is_told_as_a_share_of_the_grids_best():
    rates = {"baseline": 100.0, "handed over": 141.0}
    later = [start("", rate, "hand-over", arm=arm) for arm, rate in rates.items()]
    page, row = row_of([*GRID, searched(1.4), *later])
    assert row[1:] == [
        "100.0", "+50%: `--fast`", "+40.0% (+39.0% to +41.0%)", "93%", "`pin_memory=True`", "300",
        "100.0, 141.0 (+41%)", "+200%: `--bf16`",
    ]  # fmt: skip
    assert "at least 90% of the grid's best on 1 of 1" in page
    assert "| `--slow` | ended at its time limit: still compiling | - | 30 |" in page
    assert "| 1 | search | ok | 100 | 9.0 | `pin_memory=True` | a \\| b |" in page


@pytest.mark.parametrize(
    ("search", "verdict", "share"),
    [
        (searched(1.005, is_baseline=True), "**no gain**: +0.5% (-0.5% to +1.5%)", "**67%**"),
        (searched(1.2), "+20.0% (+19.0% to +21.0%)", "**80%**"),
        (searched(1.0, rc=1, summary=None, trials=[]), "**nothing**: exit code 1", "**0%**"),
        (searched(1.0, rc=None, summary=None), "**nothing**: ended at its time limit", "**0%**"),
    ],
)
def test_a_loss_is_told_as_plainly(search, verdict, share):
    page, row = row_of([*GRID, search])
    assert row[3:5] == [verdict, share]
    assert "on 0 of 1" in page


def test_searches_with_other_words_have_rows_of_their_own():
    page, _ = row_of([*GRID, searched(1.4), searched(1.5, words="-o a=b"), searched(1.3)])
    told = re.findall(r"\| (\+\S+% \(\S+ to \S+\))", page)
    assert told == ["+30.0% (+29.0% to +31.0%)", "+50.0% (+49.0% to +51.0%)"]
    assert "on 0 of 1" in page
