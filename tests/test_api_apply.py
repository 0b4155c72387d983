"""Where the knobs of a found configuration are read from."""

import subprocess
import sys

import pytest
import yaml

from perfsearch.api import read_knobs
from perfsearch.core.errors import BadInputError

KNOBS = {"bucket_cap_mb": 8.0, "optimizer_implementation": "fused", "compile_mode": "none"}


def write(directory, runner="ddp", knobs=None):
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"runner": {"name": runner, "knobs": KNOBS if knobs is None else knobs}}
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_file_its_directory_and_the_runs_directory_are_the_same(tmp_path):
    write(tmp_path / "run", knobs={"bucket_cap_mb": "search"})
    write(tmp_path / "run" / "best")
    best = tmp_path / "run" / "best"
    for source in (best / "config.yaml", best, tmp_path / "run", str(best)):
        assert read_knobs(source) == KNOBS
    assert read_knobs(KNOBS) == KNOBS


def test_a_script_builds_with_the_knobs_from_then_on(tmp_path):
    """In a process of its own, since constructors stay wrapped."""
    write(tmp_path / "best", knobs={**KNOBS, "dataloader_workers": 2, "nccl_algo": "Ring"})
    code = """
import sys, warnings, torch, perfsearch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert perfsearch.apply(sys.argv[1]) is None
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(net.parameters())
loader = torch.utils.data.DataLoader([1, 2])
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(net.bucket_bytes_cap, optimizer.param_groups[0]["fused"], loader.num_workers)
print(*(w.message for w in caught if "perfsearch" in str(w.message)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built, said = done.stdout.strip().splitlines()
    assert built == f"{8 * 2**20} True 2"
    assert said == "perfsearch.apply: not in force by itself: start the script with NCCL_ALGO=Ring"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"bucket_cap": 1}, "bucket_cap_mb"),
        ({"bucket_cap_mb": [1, 2]}, "give one value"),
        ({"bucket_cap_mb": "search"}, "give one value"),
        ({"bucket_cap_mb": "x"}, "bucket_cap_mb=x: allowed is a number above 0 MiB"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1: allowed is a number above 0 MiB"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan: allowed"),
        ({"gradient_as_bucket_view": "maybe"}, "gradient_as_bucket_view=maybe: allowed: false"),
        ({"gradient_as_bucket_view": 1}, "gradient_as_bucket_view=1: allowed: false, true"),
        ({"optimizer_implementation": "quick"}, "=quick: allowed: default, foreach, fused"),
        ({"attention_backend": "flush"}, "=flush: allowed: null, flash"),
        ({"dataloader_workers": 1.5}, "=1.5: allowed is a whole number of 0 or more processes"),
        ({"prefetch_factor": 0}, "=0: allowed is a whole number above 0 batches"),
    ],
)
def test_knobs_that_are_none_are_refused(source, message):
    with pytest.raises(BadInputError, match=message):
        read_knobs(source)


def test_what_other_machines_and_scripts_have_is_taken():
    found = {
        "bucket_cap_mb": 600.0, "dataloader_workers": 24, "omp_num_threads": 48,
        "attention_backend": "flash+math", "float32_matmul_precision": "highest",
        "nccl_algo": "Ring,Tree", "nccl_buffsize": "8M", "hierarchical_group_size": 4,
        "first_bucket_mb": None,
    }  # fmt: skip
    assert read_knobs(found) == found


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(BadInputError, match="no such file"):
        read_knobs(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(BadInputError, match="not what a search hands over"):
        read_knobs(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(BadInputError, match="not what a search hands over"):
        read_knobs(tmp_path)
    write(tmp_path, runner="zero")
    with pytest.raises(BadInputError, match="runner=zero"):
        read_knobs(tmp_path)
    write(tmp_path, runner="soap")
    with pytest.raises(BadInputError, match="perfsearch --config-path"):
        read_knobs(tmp_path)
    (tmp_path / "apply").mkdir()
    (tmp_path / "apply" / "dtensor_plan.py").touch()
    with pytest.raises(BadInputError, match=r"DTensor is .*dtensor_plan\.py"):
        read_knobs(tmp_path)
