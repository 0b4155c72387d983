"""How the benchmark over other people's scripts judges what it saw, and its independent clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from _public_cases import CASES, Case  # noqa: E402
from _public_judge import judge  # noqa: E402
from _public_modes import clock_of  # noqa: E402
from _public_report import report  # noqa: E402
from _searched import trials_of  # noqa: E402

CASE = Case("a", ("owner/name", "0" * 40), ".", "train.py")
REFUSED = Case("b", ("owner/name", "0" * 40), ".", "train.py", refusal="no optimizer")
FAILS = Case("c", ("owner/name", "0" * 40), ".", "train.py", plain_fails="needs a GPU")


def seen(rc=0, **values):
    empty = {"left": 0, "lines": ["the end"], "written": [], "changed": [], "trials": []}
    return {**empty, "rc": rc, **values}


def trial(purpose, status="ok", mean_s=0.1, reason=""):
    kept = {"purpose": purpose, "status": status, "mean_s": mean_s, "reason": reason}
    kept |= {"begin_step": 8, "steps": 60, "fresh": True}
    return {**kept, "baseline": purpose in ("baseline", "sentinel")}


SEARCHED = [trial("baseline"), trial("search")]


@pytest.mark.parametrize(
    ("case", "mode", "found", "judged"),
    [
        (CASE, "plain", seen(), "right"),
        (CASE, "plain", seen(1), "wrong: exit code 1"),
        (CASE, "plain", seen(None), "wrong: no end within the limit"),
        (CASE, "plain", seen(left=2), "wrong: 2 processes left"),
        (
            FAILS,
            "plain",
            seen(1, lines=["it needs a GPU", "bye"]),
            "fails as it is: it needs a GPU",
        ),
        (FAILS, "plain", seen(0), "wrong: it does not fail so"),
        (CASE, "run", seen(1), "wrong: exit code 1, 0 without perfsearch"),
        (CASE, "profile", seen(trials=SEARCHED[:1]), "right"),
        (CASE, "profile", seen(trials=[]), "wrong: nothing was measured"),
        (CASE, "profile", seen(2), "wrong: exit code 2: the end"),
        (
            CASE,
            "profile",
            seen(lines=["Traceback (most", "E"]),
            "wrong: a traceback; nothing was measured",
        ),
        (
            CASE,
            "profile",
            seen(trials=[trial("baseline", mean_s=0.05)]),
            "wrong: a mean step of 0.50 times the clock's",
        ),
        (
            CASE,
            "profile",
            seen(trials=[trial("baseline", mean_s=0.3), *[trial("sentinel", mean_s=0.12)] * 2]),
            "right",
        ),
        (REFUSED, "search", seen(1, lines=["it has no optimizer"]), "refused: it has no optimizer"),
        (REFUSED, "search", seen(0), "wrong: no true line: the end"),
        (CASE, "search", seen(trials=SEARCHED, summary={"verdict": "no gain"}), "right: no gain"),
        (CASE, "search", seen(trials=SEARCHED), "wrong: no verdict"),
        (
            CASE,
            "search",
            seen(trials=[trial("baseline"), trial("search", "diverged", None, "it did")]),
            "wrong: none of 1 trials came through: diverged: it did; no verdict",
        ),
        (
            CASE,
            "search",
            seen(
                trials=[trial("baseline"), trial("search", "interrupted", None, "no time")],
                summary={"verdict": "nothing was tried"},
            ),
            "right: nothing was tried",
        ),
        (
            CASE,
            "search",
            seen(trials=SEARCHED, changed=["model.pt"], summary={"verdict": "no gain"}),
            "wrong: files of the user's changed or written: model.pt",
        ),
    ],
)
def test_a_mode_is_judged_by_what_it_did(case, mode, found, judged):
    before = {"plain": seen(), "clock": {"step_ms": [100.0] * 80}}
    assert judge(case, mode, found, before) == judged


def test_a_rate_is_that_of_the_clock_before_or_after():
    before = {
        "plain": seen(),
        "clock": {"step_ms": [100.0] * 80},
        "clock-again": {"step_ms": [300.0] * 80},
    }
    for mean_s, judged in ((0.07, "right"), (0.2, "right"), (0.4, "right"), (0.05, "wrong")):
        found = seen(trials=[trial("baseline", mean_s=mean_s)])
        assert judge(CASE, "profile", found, before).partition(":")[0] == judged


def test_a_learners_steps_are_compared_with_the_same_ones_of_the_clock():
    before = {"plain": seen(), "clock": {"step_ms": [10.0] * 70 + [50.0] * 300}}
    late = {**trial("baseline", mean_s=0.05), "begin_step": 71, "steps": 200}
    assert judge(CASE, "profile", seen(trials=[late]), before) == "right"
    early = trial("baseline", mean_s=0.05)
    assert judge(CASE, "profile", seen(trials=[early]), before).startswith("wrong: a mean step")


def test_files_are_those_of_the_plain_start():
    before = {"plain": seen(written=["model.pt"])}
    assert judge(CASE, "knobs", seen(written=["model.pt"]), before) == "right"
    told = judge(CASE, "knobs", seen(written=["x.csv"]), before)
    assert told == "wrong: no model.pt; x.csv besides"


def test_the_clock_reads_the_steps_of_the_first_optimizer(tmp_path):
    """Two optimizers step by turns, and each step of the first is 20 ms later than the last."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, torch\n"
        "assert sys.argv == [__file__, '--lr', '1']\n"
        "a, b = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1) for _ in 'ab')\n"
        "for _ in range(12):\n"
        "    time.sleep(0.02)\n"
        "    a.step()\n"
        "    b.step()\n"
    )
    times = tmp_path / "times.json"
    clock = BENCHMARKS / "_public_clock.py"
    subprocess.run([sys.executable, clock, times, script, "--lr", "1"], check=True, timeout=120)
    found = clock_of(json.loads(times.read_text()))
    assert found["steps"] == 12
    assert len(found["step_ms"]) == 11 and min(found["step_ms"]) >= 20


def test_trials_are_read_from_a_journal(tmp_path):
    file = tmp_path / "journal.jsonl"
    events = [{"event": "began"}]
    for purpose, workers in (("baseline", 0), ("search", 2), ("sentinel", 0)):
        configuration = {"dataloader_workers": workers}
        measurement = {"step_seconds": [0.1, 0.3]}
        told = {"purpose": purpose, "configuration": configuration, "measurement": measurement}
        events.append({"event": "finished", "trial": {**told, "status": "ok", "reason": ""}})
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert [t["mean_s"] for t in trials_of(file)] == [0.2] * 3
    assert [t["baseline"] for t in trials_of(file)] == [True, False, True]


def test_the_page_has_a_row_for_each_script_and_a_line_for_what_is_wrong():
    case = CASES[0].name
    records = [
        {"key": case, "part": "plain", **seen()},
        {"key": case, "part": "search", **seen(trials=SEARCHED)},
    ]
    page = report(records)
    assert f"| {case} | right | **wrong** |" in page
    assert f"| {CASES[1].name} |" not in page
    assert f"- `{case}`, search: wrong: no verdict" in page
    assert "| **not wrong** | 1 of 1 | 0 of 1 |" in page
    assert len({c.name for c in CASES}) == len(CASES)
