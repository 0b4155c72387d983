"""A baseline whose memory really runs out: ranks under a limit on their address space."""

import sys
import textwrap

import pytest
from support.synthetic import KeptTracker, KeptView

from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose, Status
from perfsearch.pipeline.search import search
from perfsearch.runners.zero.runner import Zero
from perfsearch.strategies import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="address spaces are limited on Linux only"),
]

FACTORY = """
import resource
import torch
from torch import nn
from torch.utils.data import Dataset

PER_SAMPLE = 10_000_000  # float32 values, 38 MiB
SPARE = 450 * 2**20

class Data(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator)

def limit():
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        pages = int(open("/proc/self/statm").read().split()[0])
        used = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.RLIM_INFINITY))

def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    def loss(model, batch):
        if batch.is_meta:
            return model(batch).square().mean()
        limit()
        torch.empty(len(batch) * PER_SAMPLE)
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    return model, Data(), loss, lambda parameters: torch.optim.SGD(parameters, lr=0.05)
"""


def test_a_baseline_whose_memory_runs_out_ends_with_a_configuration_that_trains(
    tmp_path, monkeypatch
):
    (tmp_path / "tight_job.py").write_text(textwrap.dedent(FACTORY))
    monkeypatch.chdir(tmp_path)
    settings = validate(
        {
            "runner": {"name": "zero", "device": "cpu",
                       "knobs": {"micro_batch": "search", "zero_stage": 0}},
            "strategy": {"name": "fast"},
            "workload": {"name": "custom", "factory": "tight_job:build", "global_batch": 32},
            "nproc": 2,
            "confirm": {"max_repeats": 2, "finalists": 1},
            "budget": {"trials": 4, "seconds": None},
            "limits": {"startup_s": 120, "trial_s": 60, "grace_s": 20},
            "run_dir": str(tmp_path / "run"),
            "tracking": {"enabled": False},
            "sentinel_every": 0,
        }
    )  # fmt: skip
    strategy = load(settings.strategy.name)
    result = search(
        settings,
        Zero.from_settings(settings),
        lambda space, hints: strategy(space, hints, settings.seed),
        KeptView(),
        lambda settings, run_dir, search_id: KeptTracker(),
    )
    baseline = result.trials[0]
    assert baseline.configuration["micro_batch"] == 16
    assert baseline.status is Status.OOM, baseline.reason
    assert "DefaultCPUAllocator" in baseline.reason
    assert result.exit_code == 0
    assert int(result.best["micro_batch"]) < 16
    assert "the baseline does not run (oom)" in result.verdict.reason
    assert "samples/s, and is handed over (no speed-up can be stated)" in result.verdict.reason
    assert result.verdict.interval is None
    assert any(t.purpose is Purpose.CONFIRM and t.status is Status.OK for t in result.trials), (
        "what is handed over has run in fresh processes"
    )
