"""Chains of several settings over a captured job."""

import csv
from xml.etree import ElementTree

import pytest

from perfsearch.runners.soap.ablation import MARKS, main


def test_every_combination_is_a_row_a_seed_and_a_line_of_the_figure(tables, tmp_path, capsys):
    words = [str(tables), "--seeds", "2", "--proposals", "200", "--alpha", "1", "1e9"]
    words += ["--propagation", "0", "0.25", "--start", "whole", "random", "--out", str(tmp_path)]
    assert main(words) == 0
    with (tmp_path / "ablation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 2
    assert len({(r["start"], r["alpha"], r["propagation"], r["seed"]) for r in rows}) == len(rows)
    for row in rows:
        best = [
            float(row[f"best_ms_after_{100 * m // MARKS}_percent"]) for m in range(1, MARKS + 1)
        ]
        assert best == sorted(best, reverse=True)
        assert 0 < best[-1] <= best[0] <= float(row["start_ms"])
        assert 0 <= int(row["accepted"]) <= int(row["proposals"]) <= 200
    random = {r["start_ms"] for r in rows if r["start"] == "random"}
    assert len(random) == 2  # one for each seed, the same for all settings
    drawn = ElementTree.parse(tmp_path / "ablation.svg").getroot()
    assert len([e for e in drawn.iter() if e.tag.endswith("polyline")]) == 8
    told = capsys.readouterr().out
    assert "whole, alpha 1/%, propagation 0.25: best" in told
    again = tmp_path / "again"
    assert main([*words[:-1], str(again)]) == 0
    assert (again / "ablation.csv").read_text() == (tmp_path / "ablation.csv").read_text()


def test_a_start_that_there_is_not_is_named(tables, capsys):
    with pytest.raises(SystemExit):
        main([str(tables), "--start", "hole"])
    assert "--start hole: none of data parallel" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["nowhere"])
    assert "nowhere" in capsys.readouterr().err
