"""What a search leaves on a terminal of some width: the real command, over recorded trials."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.screen import shown

TABLE = Path(__file__).parents[1] / "data" / "ddp_gpt2small_4xh100_tcp.csv"
KNOBS = ("bucket_cap_mb", "hierarchical_allreduce", "nccl_nsocks_perthread", "nccl_socket_nthreads")


@pytest.fixture
def screen(tmp_path):
    (tmp_path / "table.csv").write_bytes(TABLE.read_bytes())

    def run(width, *words):
        command = [sys.executable, "-m", "perfsearch", "runner=replay", "runner.table=table.csv"]
        return shown([*command, "budget.trials=4", *words], width, tmp_path)

    return run


def rows_of(text, title):
    """The labelled lines of a card, continuations joined."""
    (card,) = re.findall(rf"^-- {title}.*?\n((?:  .*\n?)+)", text, re.MULTILINE)
    rows, label = {}, ""
    for line in card.splitlines():
        found = re.match(r"  (\S+(?: \S+)?)  +(.*)", line)
        label, more = (found[1], found[2]) if found else (label, line.strip())
        rows[label] = f"{rows.get(label, '')} {more}".strip()
    return rows


def require_fitting(text, width):
    for line in text.splitlines():
        assert len(line) <= width or len(line.split()) == 1, line
    words = [word for line in text.splitlines() for word in line.split()]
    known = [w for w in words if any(w.startswith(name[:6]) for name in KNOBS)]
    assert known
    for word in known:
        assert re.fullmatch(rf"({'|'.join(KNOBS)})(=\S+)?", word), word


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_search_on_a_terminal(screen, width):
    code, text = screen(width, "tracking.enabled=false", "run_dir=run")
    assert code == 0, text
    require_fitting(text, width)
    opening = rows_of(text, "perfsearch search: runner=replay")
    assert opening["job"] == "recorded trials of table.csv"
    assert opening["parameters"].startswith("bucket_cap_mb 1, 8, 25, 64, 256 (today 25)") or (
        "bucket_cap_mb" in opening["parameters"]
    )
    assert opening["budget"].startswith("4 trials or 3:00; then the best against the baseline")
    assert opening["directory"] == "run"
    closing = rows_of(text, "result")
    assert re.search(r"^-- result: \+\d+\.\d% faster \(95% interval \+.*\)", text, re.M)
    assert re.fullmatch(r"\d+\.\d -> \d+\.\d samples/s", closing["speed"])
    assert "faster than the baseline" in closing["verdict"]
    assert "->" in closing["changed"]
    assert closing["use it"] == "run/best/config.yaml has the values"
    assert closing["report"] == "run/report.html"
    assert "compare" not in closing  # without MLflow
    more = shlex.split(closing["more certainty"].replace(" \\", ""))
    assert {"run_dir=run", "resume=extend", "confirm.max_repeats=16"} <= set(more)
    if width >= 80:
        header = next(line for line in text.splitlines() if line.startswith("trial "))
        place = header.index("differs")
        trials = [line for line in text.splitlines() if re.match(r" {4}\d  ", line)]
        assert len(trials) > 4
        assert all(line[place - 1] == " " and line[place] != " " for line in trials)
        assert {line[: place - 2].find(".") for line in trials} == {trials[0].find(".")}


@pytest.mark.slow
def test_a_search_with_mlflow_and_the_command_that_extends_it(screen, tmp_path):
    code, text = screen(80, "run_dir=run")
    assert code == 0, text
    command, page = rows_of(text, "result")["compare"].rsplit(" ", 1)
    assert " ui " in command and "--backend-store-uri" in command
    assert re.fullmatch(
        r"http://127.0.0.1:5000/#/experiments/\d+/runs\?workflowType=machine_learning\S*", page
    )
    more = shlex.split(rows_of(text, "result")["more certainty"].replace(" \\", ""))
    assert more[0] == "perfsearch"
    code, text = shown([sys.executable, "-m", *more], 80, tmp_path)
    assert code == 0, text
    require_fitting(text, 80)
    assert "going on with" in text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("run")] == ["run"]


@pytest.mark.slow
def test_a_sweep_on_a_terminal(screen):
    words = ("-m", "strategy=grid,random", "seed=1,2", "tracking.enabled=false")
    code, text = screen(80, *words)
    assert code == 0, text
    require_fitting(text, 80)
    assert re.findall(r"^== search (\d) of 4: (.*)$", text, re.M) == [
        ("1", "strategy=grid seed=1"),
        ("2", "strategy=grid seed=2"),
        ("3", "strategy=random seed=1"),
        ("4", "strategy=random seed=2"),
    ]
    table = text.split("== 4 searches\n")[1].splitlines()
    assert table[0].split()[:2] == ["strategy", "seed"]
    assert [line.split()[:2] for line in table[1:5]] == [
        ["grid", "1"],
        ["grid", "2"],
        ["random", "1"],
        ["random", "2"],
    ]
