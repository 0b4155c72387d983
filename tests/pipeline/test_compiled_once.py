"""What one start of a search has compiled is there for the next, and goes with the search."""

import json
import os
from pathlib import Path

import pytest
from support.synthetic import SyntheticRunner

from perfsearch.core.hardware import Environment
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.objective import Limits
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status
from perfsearch.pipeline.search import compiled_once
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workers import processes
from perfsearch.workloads.spec import WorkloadSpec

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SCRIPT = Path(__file__).parents[1] / "data" / "scripts" / "repeated_blocks.py"


class Compiling(SyntheticRunner):
    """Its trials may compile."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.space = Space([*self.space.knobs, Knob("compile_mode", Kind.BOOLEAN, False)])
        self.baseline = {**self.baseline, "compile_mode": False}

    def measure(self, configuration, plan):
        self.found.append(os.environ.get(VARIABLE))
        return super().measure(configuration, plan)

    def close(self):
        super().close()
        assert all(os.path.isdir(directory) for directory in self.found)


def test_all_of_a_search_share_one_directory_that_goes_with_it(search, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    search(Compiling(), budget={"trials": 3, "seconds": None})
    (directory,) = set(search.runner.found)
    assert not os.path.exists(directory) and VARIABLE not in os.environ


def test_the_users_own_directory_is_used_and_left(search, monkeypatch, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv(VARIABLE, str(own))
    search(Compiling(), budget={"trials": 3, "seconds": None})
    assert set(search.runner.found) == {str(own)}
    assert own.is_dir() and os.environ[VARIABLE] == str(own)


def test_torchs_own_is_used_where_nothing_is_compiled_or_other_nodes_lack_it(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for runner, nodes in ((SyntheticRunner(), 1), (Compiling(), 2)):
        with compiled_once(runner, nodes):
            assert VARIABLE not in os.environ


@pytest.fixture
def in_a_search(tmp_path, monkeypatch):
    """Two starts of a runner, of which each measures the same compiled configuration."""
    monkeypatch.delenv(VARIABLE, raising=False)

    def measured(runner):
        with compiled_once(runner):
            try:
                runner.open(tmp_path)
                for number in range(2):
                    plan = Plan(
                        number, Purpose.SEARCH, fresh=True, time_limit_s=300.0,
                        log_directory=tmp_path / "logs" / str(number), scored_seconds=0.01,
                    )  # fmt: skip
                    outcome = runner.measure(runner.baseline, plan)
                    assert outcome.status is Status.OK and outcome.fresh_process, outcome.reason
                    yield outcome.measurement
            finally:
                runner.close()
        assert processes.reap_groups(tmp_path) == 0

    return measured


@pytest.mark.slow
def test_a_script_that_is_started_again_compiles_nothing_again(in_a_search, tmp_path, monkeypatch):
    """Its second start takes a fifth of the first one's seconds at most."""
    said = tmp_path / "counters"
    monkeypatch.setenv("SAY_COUNTERS", str(said))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # however many cores there are
    environment = Environment(tmp_path, limits=Limits(300, 300, 5))
    knobs = {"compile_mode": "default", "gc_each_steps": [0, 50]}
    runner = Script("cpu", knobs, Script.Options((str(SCRIPT),)), environment)
    found = []
    for measurement in in_a_search(runner):
        assert measurement.in_force["compile_mode"] == "default"
        found.append((measurement.compile_seconds, json.loads(said.read_text())))
    (first_s, first), (second_s, second) = found
    assert first.get("fxgraph_cache_miss", 0) > 0 == first.get("fxgraph_cache_hit", 0)
    assert second.get("fxgraph_cache_hit", 0) > 0 == second.get("fxgraph_cache_miss", 0)
    assert 0 < second_s <= 0.2 * first_s


@pytest.mark.slow
def test_a_group_that_is_started_again_compiles_nothing_again(in_a_search, tmp_path):
    options = DDP.Options(device="cpu", knobs={"compile_mode": "default"})
    shape = {"sequence_length": 32, "vocabulary": 64, "layers": 2, "width": 64, "heads": 2}
    environment = Environment(tmp_path, nproc=1, limits=Limits(300, 300, 5))
    runner = DDP(options, WorkloadSpec("gpt", options=shape), environment)
    kept = []
    for measurement in in_a_search(runner):
        assert measurement.in_force["compile_mode"] == "default"
        graphs = Path(os.environ[VARIABLE]) / "fxgraph"
        kept.append({path.relative_to(graphs) for path in graphs.rglob("*") if path.is_file()})
    first, second = kept
    assert first and second == first  # what is compiled anew is kept under another name
