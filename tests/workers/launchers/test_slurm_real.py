"""A search inside of a Slurm job over two nodes, by Slurm's own daemons."""

import json
import sys

import pytest
from support import slurm

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

JOB = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1
export OMP_NUM_THREADS=1
exec {python} -P -m perfsearch workload=mlp runner.device=cpu nproc=1 nnodes=2 \\
  launcher=slurm launcher.interface=lo strategy=random budget.trials=1 objective.min_gain=0 \\
  sentinel_every=0 confirm.finalists=0 tracking.enabled=false run_dir=run
"""


@pytest.fixture
def cluster(short_tmp):
    why = slurm.why_not()
    if why:
        pytest.skip(why)
    made = slurm.Slurm(short_tmp)
    yield made
    made.close()


def test_a_search_in_a_job_script_runs_on_every_node_of_its_allocation(cluster, tmp_path):
    (tmp_path / "job.sh").write_text(JOB.format(python=sys.executable))
    words = ["sbatch", "--wait", f"--chdir={tmp_path}", f"--output={tmp_path / 'out'}"]
    done = cluster.run(*words, str(tmp_path / "job.sh"), limit_s=240)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said + done.stderr
    assert "perfsearch join: joined as node 1 of 2" in said
    assert "perfsearch join: the search is over" in said
    assert "PERFSEARCH_SECRET" not in said
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").open()]
    trials = [line["trial"] for line in lines if line.get("event") == "finished"]
    assert [trial["status"] for trial in trials] == ["ok", "ok"]
    assert {trial["measurement"]["world_size"] for trial in trials} == {2}
    assert cluster.run("squeue", "--noheader").stdout == ""
