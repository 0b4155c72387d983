"""The page of a sweep, from the journals of its searches."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from support.search_runs import journal_in
from support.sweep_runs import of, searched

from perfsearch.tracking.sweep import Searched, write_beside, write_sweep


def page_of(tmp_path: Path) -> tuple[str, Path]:
    """A sweep of two strategies by two seeds; the baseline of one of them was slow."""
    runs = [
        searched(tmp_path / "b1", [1.0, 0.5, 0.6], of("bayes", 1), 2.0, sentinel=1.0),
        searched(tmp_path / "b2", [2.0, 0.8, 0.505], of("bayes", 2), 3.9, sentinel=1.0),
        searched(tmp_path / "r1", [1.0, None, 0.9], of("random", 1)),
        searched(tmp_path / "r2", [1.0, 1.1, 0.7], of("random", 2), 1.4),
    ]
    path = tmp_path / "sweep.html"
    write_sweep(path, runs)
    return path.read_text(), path


def cells(text: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", text, re.S)
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row, re.S) for row in rows]


def test_strategies_stand_by_seed_with_what_was_confirmed(tmp_path):
    text, _ = page_of(tmp_path)
    assert cells(text)[:3] == [
        ["", "seed=1", "seed=2"],
        ["bayes", "+100%", "+290%"],
        ["random", "no gain", "+40%"],
    ]


def test_readings_are_against_the_baseline_of_all(tmp_path):
    """The median reading of the baseline is 1, although one search had one of 2."""
    text, _ = page_of(tmp_path)
    rows = {tuple(row[:2]): row[2:] for row in cells(text)[3:]}
    assert rows["bayes", "1"][:5] == [
        "+100.0% (+90.0% to +110.0%)",
        "+100.0%",
        "1",
        "4.0 s",
        "gain",
    ]
    assert rows["bayes", "2"][1:4] == ["+98.0%", "2", "6.0 s"]
    assert rows["random", "1"][:4] == ["", "+11.1%", "", ""]
    assert 'href="b1/report.html"' in rows["bayes", "1"][5]


def test_each_search_has_a_curve_by_trials_and_by_seconds(tmp_path):
    text, _ = page_of(tmp_path)
    pictures = re.findall("<svg.*?</svg>", text, re.S)
    assert len(pictures) == 2 * 2
    for picture in pictures:
        ElementTree.fromstring(picture)
        lines = re.findall('class="line c([0-9])"[^>]*><title>(.*?)</title>', picture)
        assert lines == [("0", "bayes 1"), ("0", "bayes 2"), ("1", "random 1"), ("1", "random 2")]
        assert ">bayes</text>" in picture and ">random</text>" in picture
        assert ">gain over the common baseline in percent</text>" in picture
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_searches_of_other_jobs_are_not_mixed(tmp_path):
    runs = [
        searched(tmp_path / name, costs, of("bayes", 1, workload=workload), 2.0)
        for name, workload, costs in (("g", "gpt", [1.0, 0.5]), ("d", "dlrm", [10.0, 5.0]))
    ]
    write_sweep(tmp_path / "sweep.html", runs)
    text = (tmp_path / "sweep.html").read_text()
    assert re.findall("<h2>(workload.*?)</h2>", text) == ["workload=gpt", "workload=dlrm"]
    assert [row[1] for row in cells(text) if len(row) > 4 and row[1].startswith("+")] == [
        "+100.0%"
    ] * 2


def test_a_search_that_has_not_ended_is_read_as_far_as_it_came(tmp_path):
    journal = journal_in(tmp_path / "run", "run")
    journal.append("opened", unix_s=1.0, definition={}, parameters=of("bayes", 1))
    journal.close()
    found = Searched.read(tmp_path / "run")
    assert (found.trials, found.interval, found.verdict) == ([], None, "")
    write_sweep(tmp_path / "sweep.html", [tmp_path / "run"])
    assert "Best so far" not in (tmp_path / "sweep.html").read_text()


def test_a_sweep_has_a_page_of_its_own_beside_its_searches(tmp_path):
    runs = [searched(tmp_path / name, [1.0, 0.5], of(name, 1)) for name in ("a", "b", "c")]
    page = write_beside(runs[:2])
    assert page.parent == tmp_path and 'href="a/report.html"' in page.read_text()
    assert write_beside(runs[:2]) == page
    assert write_beside(runs) != page


def test_searches_that_differ_in_an_option_of_their_strategy_are_told_apart(tmp_path):
    runs = [
        searched(tmp_path / "a", [1.0, 0.5], of("bayes", 1), 2.0),
        searched(tmp_path / "b", [1.0, 0.6], of("bayes", 1, **{"strategy/xi": 0.1}), 1.5),
        searched(tmp_path / "c", [1.0, 0.7], of("fast", 1), 1.4),
    ]
    write_sweep(tmp_path / "sweep.html", runs)
    text = (tmp_path / "sweep.html").read_text()
    assert cells(text)[:4] == [
        ["", "seed=1"], ["bayes", "+100%"], ["bayes xi=0.1", "+50%"], ["fast", "+40%"]
    ]  # fmt: skip
    assert [row[0] for row in cells(text)[5:8]] == ["bayes", "bayes xi=0.1", "fast"]
    assert ">bayes xi=0.1</text>" in text


def test_searches_under_different_load_are_shown_against_their_own_baselines(tmp_path):
    """The machine's other work let up between two searches, which made the second look better."""
    parameters = of("tabu", 1, **{"strategy/tenure": 4})
    runs = [
        searched(tmp_path / "t", [0.25, 0.125], parameters, 1.8, sentinel=0.2),
        searched(tmp_path / "r", [0.06, 0.04], of("random", 1), sentinel=0.05),
    ]
    write_sweep(tmp_path / "sweep.html", runs)
    text = (tmp_path / "sweep.html").read_text()
    line = (
        "These searches ran under different load: their baselines read 400.0 to 500.0 and 1,667 to "
        "2,000 samples/s; compare the confirmed gains alone."
    )
    assert text.count(line) == 1
    rows = {row[0]: row[1:] for row in cells(text) if len(row) > 4}
    assert rows["tabu tenure=4"][1:4] == ["+80.0%", "", ""]
    assert rows["random"][1:4] == ["+37.5%", "", ""]
    assert text.count(">gain over its own baseline in percent</text>") == 2 * 2
    assert "common baseline" not in text


def test_readings_of_one_baseline_that_scatter_as_far_are_of_one_load(tmp_path):
    runs = [
        searched(tmp_path / "a", [1.0, 0.5], of("bayes", 1), sentinel=0.7),
        searched(tmp_path / "b", [0.6, 0.5], of("random", 1), sentinel=0.55),
    ]
    write_sweep(tmp_path / "sweep.html", runs)
    text = (tmp_path / "sweep.html").read_text()
    assert "different load" not in text and "gain over the common baseline" in text
