"""The same over NCCL: launched, then replayed from CUDA graphs, then with each operator timed."""

import pytest
import torch
from support.soap_odd_models import ODD
from support.soap_ranks import launch_gpu

COUNT = torch.cuda.device_count()


MODELS = ("mlp", "dlrm", "tables", "conv", "transformer")


@pytest.mark.gpu
@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "names", [MODELS, *((name,) for name in sorted(set(ODD) - {"recurrent"}))], ids="-".join
)
def test_plans_on_gpus_give_what_one_gpu_gives(tmp_path, names):
    found = launch_gpu(tmp_path, min(COUNT, 4), names, count=6)
    for name, results in found.items():
        assert max(error for error, _, _ in results) < 1e-9, (name, results)
        if name in MODELS:
            assert any(replayed for _, replayed, _ in results), name
        assert all(timed for _, _, timed in results), name
