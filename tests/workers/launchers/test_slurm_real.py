"""Searches over two nodes of Slurm's, by its own daemons: in a job script, and submitted."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import slurm, spread

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

JOB = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1
exec {search}
"""
LONGEST_S = 300


@pytest.fixture(scope="module")
def cluster():
    why = slurm.why_not()
    if why:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp") as directory:
        made = slurm.Slurm(Path(directory))
        yield made
        made.close()


def test_a_script_is_searched_in_a_job_script_on_every_node_of_its_allocation(cluster, tmp_path):
    words = spread.command(tmp_path, keys=["launcher.interface=lo"])
    (tmp_path / "job.sh").write_text(JOB.format(search=" ".join(words)))
    words = ["sbatch", "--wait", f"--chdir={tmp_path}", f"--output={tmp_path / 'out'}"]
    done = cluster.run(*words, str(tmp_path / "job.sh"), limit_s=LONGEST_S)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said + done.stderr
    assert "perfsearch join: joined as node 1 of 2" in said
    assert "perfsearch join: the search is over" in said
    assert "PERFSEARCH_SECRET" not in said
    trials = spread.finished(tmp_path)
    assert {trial["status"] for trial in trials} == {"ok"}
    assert spread.worlds(trials) == {2}
    assert all(spread.sampled(trial) >= spread.NODES for trial in trials)
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_a_search_is_submitted_and_followed_from_outside_of_an_allocation(cluster, tmp_path):
    pytest.importorskip("submitit")
    keys = ["workload=mlp", "runner.device=cpu", "nproc=1", "nnodes=2", "strategy=random"]
    keys += ["launcher=slurm", "launcher.submit=true", 'launcher.sbatch=["--time=00:20:00"]']
    keys += ["launcher.interface=lo", "budget.trials=1", "confirm.finalists=0", "run_dir=run"]
    keys += ["sentinel_every=0", "objective.min_gain=0", "tracking.enabled=false"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "perfsearch", *keys], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, **cluster.environment, "OMP_NUM_THREADS": "1"},
        timeout=LONGEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "submitted as Slurm's job" in done.stdout
    assert "perfsearch join: joined as node 1 of 2" in done.stdout
    assert "-- result" in done.stdout
    trials = spread.finished(tmp_path)
    assert {trial["status"] for trial in trials} == {"ok"}
    assert spread.worlds(trials) == {2}
