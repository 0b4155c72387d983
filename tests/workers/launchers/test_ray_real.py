"""A search of an unchanged script over a Ray cluster of two nodes, by Ray's own daemons."""

import os
import re
import signal
import subprocess
import time

import pytest
from support import ray_cluster, spread

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

LONGEST_S = 300
LENDER = r"\(Lender pid=(\d+)[^)]*\)\S* perfsearch join: joined as node 1 of 2"


@pytest.fixture
def cluster(short_tmp):
    why = ray_cluster.why_not()
    if why:
        pytest.skip(why)
    made = ray_cluster.Ray(short_tmp)
    yield made
    made.close()


def test_an_unchanged_script_is_searched_over_both_nodes_and_an_actor_may_die(cluster, tmp_path):
    keys = ["launcher=ray", "launcher.interface=lo", "launcher.wait_s=120"]
    output = tmp_path / "output"
    with output.open("wb") as file:
        search = subprocess.Popen(
            spread.command(tmp_path, keys=keys), stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, cwd=tmp_path, env={**os.environ, **cluster.environment},
        )  # fmt: skip
    try:
        deadline, lender = time.monotonic() + LONGEST_S, None
        while lender is None:
            assert time.monotonic() < deadline and search.poll() is None, output.read_text()
            lender = re.search(LENDER, output.read_text())
            time.sleep(0.1)
        os.kill(int(lender[1]), signal.SIGKILL)
        assert search.wait(LONGEST_S) == 0, output.read_text()
    finally:
        search.kill()
        search.wait()
    said = output.read_text()
    assert "launcher=ray: an actor is gone" in said
    assert f"ip={ray_cluster.SECOND}" in said  # which Ray names with some of the lines only
    assert "perfsearch join: the search is over" in said
    trials = spread.finished(tmp_path)
    assert {trial["status"] for trial in trials} - {"infrastructure"} == {"ok"}
    assert spread.worlds(trials) == {2}
