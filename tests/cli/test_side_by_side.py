"""Searches that Hydra's launchers run at the same time."""

import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.journal import read

TABLE = Path(__file__).parents[1] / "data" / "ddp_gpt2small_4xh100_tcp.csv"


@pytest.mark.slow
def test_searches_at_the_same_time_have_a_journal_each_and_one_store_and_named_lines(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    from mlflow import MlflowClient

    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "runner=replay"]
    words += [f"runner.table={TABLE}", "strategy=random,grid", "budget.trials=4"]
    words += ["confirm.finalists=0", "objective.min_gain=0"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "perfsearch", *words], cwd=tmp_path, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = ("[strategy=random] ", "[strategy=grid] ")
    assert [line for line in lines if line and not line.startswith(names)] == []
    for name in names:
        own = [line.removeprefix(name) for line in lines if line.startswith(name)]
        assert any(line.startswith("-- result") for line in own)
        hint = next(line for line in own if " perfsearch runner=replay " in line)
        assert f"strategy={name[10:-2]}" in hint and "hydra" not in hint
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    journals = sorted((tmp_path / "outputs").glob("*/journal.jsonl"))
    assert len(parents) == len(journals) == 2
    for journal in journals:
        _, events = read(journal)
        trials = [event for event in events if event.name == "finished"]
        assert len(trials) >= 5 and events[-1].name == "ended"
    assert {run.info.status for run in runs} == {"FINISHED"}
