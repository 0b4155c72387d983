"""Real ranks over gloo through the pipeline: OOM, a diverged configuration, nothing that fits."""

import textwrap

import pytest
from support.synthetic import KeptTracker, KeptView

from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose, Status
from perfsearch.pipeline.search import search
from perfsearch.runners.zero import runner as zero
from perfsearch.runners.zero.runner import Zero
from perfsearch.strategies import load
from perfsearch.workers import processes

pytestmark = pytest.mark.slow

FACTORY = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randn(1, generator=generator)

def build():
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)]
    model = nn.Sequential(*layers)
    def loss(model, batch):
        x, y = batch
        if len(x) >= OOM_FROM and not x.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB (injected)")
        scale = 2.0 if len(x) == DIVERGES_AT else 1.0
        return scale * nn.functional.mse_loss(model(x), y)
    from perfsearch.workloads.base import Job
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.05)
    return Job(model, Data(), loss, optimizer, blocks=[model[0], model[2]])
"""


def run(directory, monkeypatch, oom_from, diverges_at, **changes):
    source = FACTORY.replace("OOM_FROM", str(oom_from)).replace("DIVERGES_AT", str(diverges_at))
    (directory / "zero_job.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(directory)
    monkeypatch.setattr(zero, "_FAR_SLOWER", 1e9)  # here every trial is to run to its end
    settings = validate(
        {
            "runner": {"name": "zero", "device": "cpu", **changes.pop("runner", {})},
            "strategy": {"name": "grid"},
            "workload": {"name": "custom", "factory": "zero_job:build", "global_batch": 32},
            "nproc": 2,
            "budget": {"trials": 20, "seconds": None},
            "confirm": {"max_repeats": 2, "finalists": 1},
            "limits": {"startup_s": 90, "trial_s": 60, "grace_s": 20, "consecutive_failures": 20},
            "run_dir": str(directory / "run"),
            "tracking": {"enabled": False},
            "sentinel_every": 0,
            **changes,
        }
    )
    runner, view = Zero.from_settings(settings), KeptView()
    strategy = load(settings.strategy.name)
    tokens = []
    close = runner.close

    def closing():
        if runner._pools.pools[0]._group is not None:
            tokens.append(runner._pools.pools[0]._group.token)
        close()

    runner.close = closing
    result = search(
        settings,
        runner,
        lambda space, hints: strategy(space, hints, settings.seed),
        view,
        lambda settings, run_dir, search_id: KeptTracker(),
    )
    assert [p for token in tokens for p in processes.members(token)] == []
    return result, view


def test_a_baseline_that_runs_out_of_memory_ends_with_what_trains(tmp_path, monkeypatch):
    """Micro-batches from 4 run out of memory, 2 trains something else; only 1 is left."""
    result, _ = run(tmp_path, monkeypatch, 4, 2, runner={"knobs": {
        "micro_batch": "search", "zero_stage": [0, 2], "activation_checkpointing": 0}})  # fmt: skip
    by_knobs = {
        (t.configuration["zero_stage"], t.configuration["micro_batch"]): t
        for t in result.trials
        if t.purpose is not Purpose.CONFIRM
    }
    baseline = by_knobs[0, 16]
    assert (baseline.number, baseline.status) == (0, Status.OOM)
    assert "CUDA out of memory" in baseline.reason
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    # after the first trial's failure the group stays warm through failures and stages
    assert [t.fresh_process for t in searched] == [False] * len(searched)
    assert by_knobs[0, 1].status is Status.OK
    assert by_knobs[2, 1].status is Status.OK
    assert {by_knobs[stage, 2].status for stage in (0, 2)} == {Status.DIVERGED}
    assert "where trial 1's is" in by_knobs[0, 2].reason
    assert by_knobs[2, 4].status is Status.OOM
    assert (2, 8) not in by_knobs  # screened: 4 had run out of memory, all else equal
    assert result.best["micro_batch"] == 1
    assert result.exit_code == 0
    assert "the baseline does not run" in result.verdict.reason
    code = (result.run_dir / "best/apply/zero.py").read_text()
    assert "number == 16" in code
    survived = [p for p in (result.run_dir / "logs").glob("*/rank0.log")
                if "survived its longest batch" in p.read_text()]  # fmt: skip
    assert len(survived) == 1


def test_nothing_that_fits_is_a_result_with_advice(tmp_path, monkeypatch):
    result, _ = run(tmp_path, monkeypatch, 1, 0, runner={"knobs": {
        "micro_batch": [16], "zero_stage": [0, 3]}})  # fmt: skip
    assert result.exit_code == 1
    assert {t.status for t in result.trials} == {Status.OOM}
    assert "no trial succeeded: 2 oom" in result.verdict.reason
    assert "closest: micro_batch=16, zero_stage=3" in result.verdict.reason
