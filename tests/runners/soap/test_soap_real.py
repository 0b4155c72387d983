"""The command, with real ranks: described, searched, run, handed over."""

import csv
import json
import re
import subprocess
import sys

import pytest

from perfsearch.soap.graph import parse_graph

pytestmark = pytest.mark.slow


def test_the_command_searches_and_runs_plans(tmp_path):
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    line = [
        *(sys.executable, "-m", "perfsearch.cli.search", "runner=soap", "strategy=mcmc"),
        *("workload=mlp", "nproc=2", "runner.device=cpu", f"run_dir={run_dir}"),
        *(f"runner.cache={cache}", "strategy.proposals=2000", "budget.trials=2"),
        *("confirm.max_repeats=2", "confirm.finalists=1", "tracking.enabled=false"),
    ]
    made = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert made.returncode == 0, made.stderr
    (told,) = re.findall(r"simulated (\d+) proposals .* from data parallel, ", made.stdout)
    assert 0 < int(told) <= 2000
    shown = [int(number) for number in re.findall(r"iter\((\d+)\) cur", made.stdout)]
    assert shown and max(shown) <= int(told)
    assert "num_dims(2)" in made.stdout
    (ddp,) = re.findall(r"(?m)^ *DistributedDataParallel +([\d.]+) +as runner=ddp", made.stdout)
    assert float(ddp) > 0
    for name in ("handed over", "data parallel", "whole", "layers by device"):
        assert re.search(rf"(?m)^ *{name} +[\d.]+ +[\d.]+ [MG]iB", made.stdout), name
    machine = json.loads((run_dir / "soap" / "machine.json").read_text())
    assert machine["calibrated"]
    assert set(machine["within"]) >= {"exchange", "all_reduce"}
    assert len(list(cache.iterdir())) == 2
    summary = json.loads((run_dir / "best" / "summary.json").read_text())
    if summary["is_baseline"]:
        text = (run_dir / "best" / "apply" / "strategy.yaml").read_text()
        assert "degrees: [2, 1], devices: [0, 1]" in text
        # one mesh, which DTensor trains as well
        assert (run_dir / "best" / "apply" / "dtensor_plan.py").is_file()
    else:
        assert (run_dir / "best" / "apply" / "dtensor_plan.py").is_file() or (
            "no dtensor_plan.py: " in made.stdout
        )
    with (run_dir / "best" / "apply" / "simulated_against_measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert all(float(row["measured_ms"]) > 0 for row in rows)
    table = run_dir / "best" / "apply" / "simulated_against_measured_by_operator.csv"
    with table.open() as file:
        by_operator = list(csv.DictReader(file))
    graph = parse_graph((run_dir / "soap" / "graph.json").read_text())
    operators = [operator.name for operator in graph.planned]
    assert [row["operator"] for row in by_operator] == operators * len(rows)
    assert {row["trials"] for row in by_operator} == {row["trials"] for row in rows}
    for strategy in rows:
        own = [row for row in by_operator if row["trials"] == strategy["trials"]]
        together_ms = sum(float(row["measured_ms"]) for row in own)
        # nothing overlaps when operators are timed, and the optimizer is not among them
        assert 0.02 < together_ms / float(strategy["measured_ms"]) < 50
        assert all(float(row["simulated_ms"]) > 0 for row in own)
    assert "operators furthest from what was simulated" in made.stdout
