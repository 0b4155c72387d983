"""Keys that reach a search past Hydra's grammar."""

from perfsearch.cli import search as cli
from perfsearch.config.compose import merged as merge

ODD = ["train.py", "--lr=1e-3", "a,b", "{}", "${x}", "'", "[", ""]


def test_given_keys_go_before_the_composed_ones_group_by_group():
    composed = {"workload": {"name": "script", "command": ["SCRIPT"], "map": []}, "seed": 0}
    merged = merge(composed, {"workload": {"command": ODD}})
    assert merged == {"workload": {"name": "script", "command": ODD, "map": []}, "seed": 0}
    assert composed["workload"]["command"] == ["SCRIPT"]


def test_the_command_hands_them_over_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        "perfsearch.pipeline.search.carry_out",
        lambda settings, open_view: (None, seen.append(settings) or 0),
    )
    arguments = ["workload=script", "workload.command=[SCRIPT]", "nproc=2"]
    assert cli.main(arguments, {"workload": {"command": ODD}}) == 0
    assert seen[0].workload.options["command"] == ODD
    assert cli.Job({"seed": 1}).given == {"seed": 1}
