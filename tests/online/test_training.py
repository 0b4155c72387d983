"""Tuning on real processes over gloo: nothing of the training is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import online_ranks
from torch.multiprocessing.spawn import ProcessException

from perfsearch.online import log

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
OWN_PROCESSES = ("hanging", "uneven")
"""Scenarios in which it matters how a rank ends: the ranks of others may be forks."""
ORDER_OF_SUMS = (1e-5, 1e-6)
"""Largest relative difference of losses and of weights that another order of sums makes here."""


@pytest.fixture
def run(tmp_path):
    """Run a scenario; what each rank found, and what was said."""

    def run(scenario, nproc=2):
        output = tmp_path / "output.txt"
        if scenario in OWN_PROCESSES:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={nproc}", online_ranks.__file__]
            with output.open("w") as file:
                done = subprocess.run(
                    [*command, scenario, str(tmp_path)], stdout=file, stderr=file, timeout=400,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
                )  # fmt: skip
            assert done.returncode == 0, output.read_text()[-4000:]
        else:
            try:
                online_ranks.launch(scenario, tmp_path, nproc)
            except ProcessException:
                pytest.fail(output.read_text()[-4000:])
        found = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(nproc)]
        return found, output.read_text()

    return run


def left(directory):
    """Processes that outlived the job."""
    session, found = int((directory / "session").read_text()), []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("PERFSEARCH_TEST_MARK") == str(directory)
            if marked or os.getsid(process.pid) == session:
                found.append(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return found


def is_same(differences):
    losses, weights = differences
    return losses < ORDER_OF_SUMS[0] and weights < ORDER_OF_SUMS[1]


def test_everything_goes_on_through_many_settings(run):
    for found in run("rewrapped")[0]:
        assert is_same(found["differs"]), found["differs"]
        for asked, got in zip(found["asked"], found["got"], strict=True):
            assert {name: got[name] for name in asked} == pytest.approx(asked, rel=1e-4)
        assert found["hook_calls"] == 60
        assert found["same_parameters"] and found["state_keys"]
        assert found["is_ddp"] and found["copied"]
        assert "not reduced" in found["static_graph"]


def test_a_static_graph_comes_and_goes(run):
    for found in run("static_graph")[0]:
        assert found["differs"] == [0.0, 0.0]
        assert found["values"] == [True, False, True, False]


def test_reduced_in_stages_and_flat_in_turn(run):
    for found in run("hierarchical", nproc=4)[0]:
        assert is_same(found["differs"]), found["differs"]
        assert found["sizes"] == [2, 0, 2, 0]


def test_the_scripts_own_hook_is_carried_along(run):
    for found in run("users_hook", nproc=4)[0]:
        assert (found["size"], found["after"]) == (2, 0)
        assert found["buckets"] >= 12
        assert "its own hook" in found["refused"]
        assert "of its own" in found["fixed"]["hierarchical_group_size"]
        assert is_same(found["differs"]), found["differs"]


def test_a_tuned_run_is_the_untuned_run(run, tmp_path):
    ranks, _ = run("tuned")
    for found in ranks:
        assert is_same(found["differs"]), found["differs"]
        assert found["heavy"] == []
        assert not any(found["running"])
    assert ranks[0]["in_force"] == ranks[1]["in_force"]
    record = log.read(tmp_path / "log.csv")
    assert record.finished
    for name, value in ranks[0]["in_force"].items():
        assert record.kept[name] == value
    flags = {"default": [None, None], "foreach": [True, False], "fused": [False, True]}
    assert ranks[0]["implementation"] == flags[record.kept["optimizer_implementation"]]
    assert left(tmp_path) == []


def test_settings_that_fail_or_take_too_long_are_rolled_back(run, tmp_path):
    ranks, _ = run("failing")
    for found in ranks:
        assert is_same(found["differs"]), found["differs"]
    assert ranks[0]["in_force"] == ranks[1]["in_force"]
    trials = log.read(tmp_path / "log.csv").trials
    by_cap = {t.configuration["bucket_cap_mb"]: t for t in trials}
    assert by_cap[0.5].status == by_cap[1.0].status == "oom"
    assert by_cap[2.0].status == "timeout"
    assert ranks[0]["in_force"]["bucket_cap_mb"] in (0.25, 25.0)


def test_a_path_that_hangs_holds_up_no_step(run, tmp_path):
    ranks, _ = run("hanging", nproc=4)
    for found in ranks:
        assert is_same(found["differs"]), found["differs"]
        assert found["in_force"]["hierarchical_group_size"] == 0
    trials = log.read(tmp_path / "log.csv").trials
    staged = [t for t in trials if t.configuration["hierarchical_group_size"] == 2]
    assert staged
    assert {t.status for t in staged} == {"timeout"}
    assert max(found["seconds"] for found in ranks) < 90


def test_ranks_that_step_differently_end_tuning_and_nothing_else(run):
    ranks, output = run("apart")
    assert "do all ranks train the same number of steps?" in output
    assert max(found["seconds"] for found in ranks) < 60


def test_two_models_take_turns(run, tmp_path):
    for found in run("two_models")[0]:
        assert all(is_same(d) for d in found["differs"]), found["differs"]
    assert log.read(tmp_path / "log-model1.csv").trials
    assert not (tmp_path / "log.csv").exists()  # of the model that is never trained


def test_tuning_goes_on_with_the_optimizer_of_a_later_stage(run, tmp_path):
    for found in run("stages")[0]:
        assert all(is_same(d) for d in found["differs"]), found["differs"]
    trials = log.read(tmp_path / "log.csv").trials
    assert len(trials) > 1, trials


def test_one_line_in_a_script(run, tmp_path):
    found, _ = run("one_line")
    assert found[0]["type"] == "DistributedDataParallel"
    record = log.read(tmp_path / "log.csv")
    assert record.trials[0].configuration["bucket_cap_mb"] == 3.0


def test_a_log_is_frozen_or_started_from(run, tmp_path):
    ranks, output = run("frozen")
    first, second, third = ranks[0]["runs"]
    assert ranks[1]["runs"] == ranks[0]["runs"]
    assert second[:2] == first[:2]
    assert second[1] is True
    assert second[2] <= 15  # nothing is tuned: it is over after the warm-up
    assert "samples of the earlier log are known" in output
    record = log.read(tmp_path / "third.csv")
    assert record.finished and third[2] > 0
    # what the first run kept is measured right after today's settings
    kept_mb = record.trials[1].configuration["bucket_cap_mb"]
    assert kept_mb == pytest.approx(first[0]["bucket_cap_mb"], rel=1e-4)


def test_a_found_configuration_is_applied(run):
    for found in run("applied")[0]:
        assert found["first"]["bucket_cap_mb"] == pytest.approx(0.1, rel=1e-4)
        assert found["first"]["gradient_as_bucket_view"] is True
        assert found["second"]["gradient_as_bucket_view"] is True
        assert found["second"]["bucket_cap_mb"] == 25.0
        assert found["foreach"] is True
        assert found["said"] == [
            "perfsearch.apply: not in force by itself: DataLoader(..., num_workers=2)"
        ]


def test_under_join_nobody_is_waited_for(run):
    ranks, output = run("uneven")
    assert [found["steps"] for found in ranks] == [0, 0]
    assert max(found["seconds"] for found in ranks) < 20
    assert "no optimizer of torch's has stepped" in output
