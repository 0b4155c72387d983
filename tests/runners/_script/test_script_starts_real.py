"""Small scripts of many kinds, started as they are meant to be, or answered in one line."""

from pathlib import Path

import psutil
import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits, Objective
from perfsearch.core.trial import WITHOUT_LOADER, Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners._script.ways import Way
from perfsearch.runners.base import Plan
from perfsearch.workers import processes

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"


@pytest.fixture
def begin(tmp_path):
    made = []

    def begin(name, nproc=None, batch="fixed", arguments=(), knobs=None, **options):
        where = Environment(tmp_path, nproc=nproc, limits=Limits(180, 180, 5))
        asked = Script.Options((str(SCRIPTS / name), *arguments), **options)
        made.append(Script("cpu", knobs or {"pin_memory": "search"}, asked, where, batch))
        made[-1].open(tmp_path)
        return made[-1]

    yield begin
    for one in made:
        one.close()
    assert processes.reap_groups(tmp_path) == 0


def measured(runner, directory, seconds=0.02):
    logs = directory / "logs" / "0000"
    plan = Plan(0, Purpose.BASELINE, scored_seconds=seconds, log_directory=logs)
    return runner.measure(runner.baseline, plan)


@pytest.mark.parametrize(
    ("name", "samples", "says"),
    [
        ("single_process.py", 16, []),
        ("batch_object.py", 32, []),
        ("no_loader.py", None, ["no batch of a DataLoader was seen", "scored is steps/s"]),
        ("unbatched_stream.py", None, ["batch_size=None", "scored is steps/s"]),
    ],
)
def test_a_script_gets_one_process_without_a_rank(begin, tmp_path, name, samples, says):
    runner = begin(name)
    assert runner.identity()["launcher"] == "python"
    outcome = measured(runner, tmp_path)
    assert (outcome.status, outcome.reason) == (Status.OK, "")
    assert (outcome.measurement.samples_per_step, outcome.measurement.world_size) == (samples, 1)
    untold = outcome.measurement.environment.get(WITHOUT_LOADER, False)
    assert untold == (name == "no_loader.py")
    unit = Objective().unit(outcome.measurement)
    assert unit == ("steps/s" if samples is None else "samples/s")
    warnings = [line for line in runner.remarks if line.startswith("warning: ")]
    assert len(warnings) == bool(says) and all(part in warnings[0] for part in says)


def test_the_samples_of_a_step_are_taken_as_given_and_asked_for_where_batches_differ(
    begin, tmp_path
):
    batches = {"map": ("micro_batch=--batch_size",), "arguments": ("--batch_size", "4")}
    asks = measured(begin("no_loader.py", batch="free", **batches), tmp_path)
    assert asks.status is Status.INVALID and "workload.samples_per_step=N" in asks.reason
    runner = begin("no_loader.py", batch="free", samples_per_step=16, **batches)
    assert measured(runner, tmp_path).measurement.samples_per_step == 16
    other = runner.measure(
        {**runner.baseline, "micro_batch": 2},
        Plan(1, scored_seconds=0.02, log_directory=tmp_path / "logs" / "0001"),
    )
    assert other.measurement.samples_per_step == 8


def test_a_script_that_reads_its_rank_gets_one(begin, tmp_path):
    """And one rank only where several would train apart."""
    runner = begin("apart_by_rank.py")
    first, second = runner.remarks[:2]
    assert "one for torchrun (KeyError: 'RANK')" in first and "with 2 ranks" in first
    assert "train apart" in second and "with 1 rank by torchrun" in second
    assert runner._ways.way == Way(1, by_torchrun=True)
    assert measured(runner, tmp_path).status is Status.OK


@pytest.mark.parametrize(
    ("name", "nproc", "says"),
    [
        ("no_optimizer.py", None, "without a torch optimizer"),
        ("ends_unmet.py", None, 'no step of a torch optimizer; its last line: "Needs photos'),
        ("trains_in_children.py", None, "in processes that it starts itself"),
        ("uneven_join.py", None, "uneven inputs (Join"),
        ("single_process.py", 2, "or have it started as one process: nproc=auto"),
    ],
)
def test_what_cannot_be_measured_is_answered_in_the_first_start(begin, tmp_path, name, nproc, says):
    outcome = measured(begin(name, nproc), tmp_path, seconds=5.0)
    assert outcome.status is Status.INVALID
    assert says in outcome.reason and "\n" not in outcome.reason


def test_loader_processes_work_whatever_the_temporary_directory(tmp_path, short_tmp, monkeypatch):
    """riga/law#184"""
    long = short_tmp / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    asked = Script.Options((str(SCRIPTS / "single_process.py"),))
    where = Environment(tmp_path, nproc=None, limits=Limits(60, 60, 5))
    runner = Script("cpu", {"dataloader_workers": "search"}, asked, where, "fixed")
    runner.open(tmp_path)
    try:
        plan = Plan(
            0, Purpose.SEARCH, 60.0, scored_seconds=0.02, log_directory=tmp_path / "logs" / "1"
        )
        outcome = runner.measure({**runner.baseline, "dataloader_workers": 1}, plan)
        assert (outcome.status, outcome.reason) == (Status.OK, "")
    finally:
        runner.close()
    assert list(long.glob("pymp-*")) == []


def test_a_first_start_that_is_struck_from_outside_keeps_its_knobs(begin, tmp_path):
    """Found by benchmarks/soak.py: the retried baseline ran, in a space that had no knobs."""
    struck = tmp_path / "struck"
    runner = begin(
        "struck_once.py", arguments=[str(struck)], knobs={"optimizer_implementation": "search"}
    )
    assert struck.exists()
    assert any("was ended by SIGKILL; starting it again" in line for line in runner.remarks)
    assert not runner.start_failure
    assert runner.space.by_name
    assert measured(runner, tmp_path).status is Status.OK


def test_nothing_of_a_search_listens_beyond_this_host(tmp_path):
    cases = Path(__file__).parents[2] / "support" / "script_cases.py"
    where = Environment(tmp_path, nproc=2, limits=Limits(180, 180, 5))
    runner = Script("cpu", {"pin_memory": "search"}, Script.Options((str(cases),)), where)
    try:
        runner.open(tmp_path)
        assert runner.start_failure == ""
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [c for p in family for c in p.net_connections("tcp") if c.status == "LISTEN"]
        assert [c for c in sockets if c.laddr.ip == "127.0.0.1"], "the ranks' store"
        assert not [c for c in sockets if c.laddr.ip in ("0.0.0.0", "::")]
    finally:
        runner.close()
