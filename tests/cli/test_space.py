"""The command ``perfsearch space``."""

import json

import pytest

from perfsearch.cli import search as cli


@pytest.fixture
def space(monkeypatch, tmp_path, capsys):
    """Runs the command; its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = cli.main(["space", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


DDP = ("runner=ddp", "runner.device=cpu", "nproc=2", "workload=mlp")


def test_a_table_for_people(space, tmp_path):
    code, out, err = space(
        *DDP, "runner.knobs.bucket_cap_mb=[8,25]", "runner.knobs.static_graph=true"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (row,) = [line for line in lines if line.startswith("bucket_cap_mb")]
    assert row.split() == [
        *("bucket_cap_mb", "25.0", "8,", "25", "MiB", "nothing", "reordered", "communication")
    ]
    fixed, left_out = lines.index("fixed"), lines.index("left out")
    assert "  static_graph=true" in lines[fixed:left_out]
    assert any("NCCL is not used on a CPU" in line for line in lines[left_out:])
    assert max(map(len, lines)) <= 100
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_one_object_for_programs(space):
    code, out, _ = space("--json", *DDP)
    assert code == 0
    found = json.loads(out)
    assert found["job"]["workload"].startswith("mlp/")
    assert {"searched", "fixed", "left out"} == {knob["state"] for knob in found["knobs"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runner.knobs.bucket_cap_mb=4000"], "runner.knobs.bucket_cap_mb=4000: allowed is 1 to"),
        (["runner.knobs.bucket_cap=1"], "Did you mean"),
        (["sed=1"], "Did you mean 'seed'?"),
        (["--wrong"], "--wrong: no such option"),
        (["--command", "nowhere.py"], "nowhere.py: no such script"),
        (["--command", "A=1 train.py"], "A=...: start perfsearch itself with it"),
        (["--command"], "--command: expected one argument"),
    ],
)
def test_what_a_search_refuses_is_refused_with_the_same_words(space, words, said):
    code, out, err = space(*DDP, *words)
    assert (code, out) == (2, "")
    assert said in err and err.startswith("perfsearch")
    assert len(err.splitlines()) == 1


def test_a_script_is_named_as_it_is_started(space, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    code, out, err = space(
        "--command", "torchrun --nproc-per-node 2 train.py --lr 1", "--json", "runner.device=cpu"
    )
    assert code == 0, err
    assert err == ""
    found = json.loads(out)
    assert found["job"]["workload"] == "script train.py --lr 1"
    assert found["job"]["world_size"] == "2"
    assert "was not started" in found["unseen"]
    assert "bucket_cap_mb" in {knob["name"] for knob in found["knobs"]}


def test_help(space):
    code, out, _ = space("--help")
    assert code == 0
    assert "--command 'SCRIPT ...'" in out
