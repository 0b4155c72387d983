from __future__ import annotations

import csv
import json
import math
import subprocess
import sys

import pytest
import yaml
from support.search_runs import measurement, trial

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.core.version import version
from perfsearch.tracking import export
from perfsearch.tracking.export import commit, provenance

KNOBS = [
    Knob("bucket_cap_mb", Kind.INTEGER, 25, low=1, high=256),
    Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring")),
    Knob("static_graph", Kind.BOOLEAN, False),
]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_a_trial_with_values_as_the_command_line_takes_them(tmp_path):
    first = {"bucket_cap_mb": 25, "algorithm": None, "static_graph": True}
    trials = [trial(0, configuration=first), trial(1, Status.OOM, reason="out of\n memory, twice")]
    path = export.write_trials(tmp_path, trials, KNOBS, {"pin_memory": False})
    good, failed = rows(path)
    assert (good["trial"], good["purpose"], good["status"]) == ("0", "baseline", "ok")
    assert (good["bucket_cap_mb"], good["algorithm"], good["static_graph"]) == (
        "25",
        "null",
        "true",
    )
    assert good["pin_memory"] == failed["pin_memory"] == "false"
    assert [float(ms) for ms in good["step_ms"].split()] == [100.0] * 10
    assert float(good["samples_per_s"]) == pytest.approx(320)
    assert [float(x) for x in good["first_losses"].split()] == [3.0, 2.0]
    assert good["world_size"] == "2"
    assert failed["reason"] == "out of memory, twice"
    assert failed["objective"] == failed["step_ms"] == failed["samples_per_s"] == ""


def test_columns_are_those_of_the_interface(tmp_path):
    header = export.write_trials(tmp_path, [], KNOBS).read_text().strip().split(",")
    assert header[:6] == [
        "trial",
        "purpose",
        "status",
        "bucket_cap_mb",
        "algorithm",
        "static_graph",
    ]
    assert header[6:9] == ["objective", "samples_per_s", "step_ms"]
    assert header[9:11] == ["peak_allocated_gib", "peak_reserved_gib"]
    assert header[-2:] == ["trial_seconds", "reason"]


def test_a_trial_with_no_steps_left_has_no_throughput(tmp_path):
    path = export.write_trials(
        tmp_path, [trial(0, measurement=measurement(step_seconds=[]))], KNOBS
    )
    assert rows(path)[0]["samples_per_s"] == ""


def test_a_knob_named_as_an_outcome_is_refused(tmp_path):
    knob = Knob("reason", Kind.BOOLEAN, False)
    with pytest.raises(ValueError, match="the knob reason"):
        export.write_trials(tmp_path, [], [knob])


def test_settings_read_back_as_they_were(tmp_path):
    settings = {
        "runner": {"name": "ddp", "knobs": {"algo": "on", "lr": 1e-5, "none": None, "b": True}},
        "workload": {"command": ["train.py", "--x=1,2", "{}", "ünïcode"]},
    }
    export.write_config(tmp_path / "best/config.yaml", settings)
    assert yaml.safe_load((tmp_path / "best/config.yaml").read_text()) == settings


@pytest.mark.parametrize("value", [{1, 2}, (1, 2), Status.OK, object()])
def test_settings_that_are_not_plain_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"plain values|read back"):
        export.write_config(tmp_path / "config.yaml", {"a": value})
    assert not (tmp_path / "config.yaml").exists()


def test_the_summary_is_json_without_numbers_that_json_lacks(tmp_path):
    numbers = {"speed_up": 1.5, "bad": math.nan, "list": [1.0, math.inf]}
    export.write_summary(tmp_path / "best/summary.json", numbers, {"driver": "570"})
    found = json.loads((tmp_path / "best/summary.json").read_text())
    assert found == {
        "schema": 1,
        "speed_up": 1.5,
        "bad": None,
        "list": [1.0, None],
        "provenance": {"driver": "570"},
    }


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", directory, *arguments], check=True, capture_output=True)


def test_commit_and_whether_files_differ(tmp_path):
    assert commit(tmp_path) == {}
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "train.py").write_text("2")
    assert commit(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_what_it_tells_is_plain_and_has_no_environment(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("MY_TOKEN", "do-not-tell")
    found = provenance(tmp_path)
    assert found["perfsearch"] == version()
    assert found["versions"]["torch"]
    assert found["devices"] == []
    assert "driver" not in found
    assert "code" not in found
    assert "do-not-tell" not in json.dumps(found)


def test_no_cell_is_a_formula_and_the_same_value_is_read_back(tmp_path):
    knob = Knob("a", Kind.CATEGORICAL, "=1+1", ("=1+1", "-x", "\x1b[2Jx", 64, -1.5))
    rows = [
        Trial(n, {"a": v}, Purpose.SEARCH, Status.OK, reason="\x1b[31m@x")
        for n, v in enumerate(knob.values)
    ]
    path = export.write_trials(tmp_path, rows, [knob])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["a"] for row in found] == ["'=1+1", "'-x", "\\x1b[2Jx", "64", "-1.5"]
    assert found[0]["reason"] == "\\x1b[31m@x"
    assert export.as_cell(64.0) == export.as_cell(64) == "64"
