"""A script with Accelerate's FSDP plugin, searched: stages and prefetching inside one start."""

import importlib.util
from pathlib import Path

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

DATA = Path(__file__).parents[2] / "data" / "scripts"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="needs accelerate",
    ),
]


def test_the_plugins_modules_are_changed_inside_one_start(tmp_path):
    options = Script.Options((str(DATA / "fsdp_on_cpu.py"), str(DATA / "accelerate_plugin.py")))
    wanted = dict.fromkeys(("zero_stage", "forward_prefetch", "backward_prefetch"), "search")
    environment = Environment(tmp_path, nproc=2, limits=Limits(120, 90, 5))
    runner = Script("cpu", {**wanted, "cpu_offload": "search"}, options, environment)
    found = []
    try:
        runner.open(tmp_path)
        start = runner._runs.group
        baseline = {"zero_stage": 3, "forward_prefetch": 0, "backward_prefetch": 0}
        assert {name: runner.baseline[name] for name in wanted} == baseline
        assert runner.left_out["cpu_offload"] == "no GPU is used"
        for number, changes in enumerate((
            {}, {"zero_stage": 2, "forward_prefetch": 2}, {"backward_prefetch": 1}, {},
        )):  # fmt: skip
            plan = Plan(
                number, Purpose.SEARCH if number else Purpose.BASELINE,
                log_directory=tmp_path / "logs" / str(number), scored_seconds=0.05,
                time_limit_s=90.0,
            )  # fmt: skip
            outcome = runner.measure(runner.space.canonical({**runner.baseline, **changes}), plan)
            assert (outcome.status, outcome.fresh_process) == (Status.OK, False), outcome.reason
            assert runner._runs.group is start
            values = outcome.measurement.in_force
            assert {name: values[name] for name in wanted} == {**baseline, **changes}
            found.append(outcome.measurement.first_losses)
    finally:
        runner.close()
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-5)
