"""What is in force today can always be pinned, in every runner and on a machine of any size."""

import json
import os
import sys

import pytest

from perfsearch.config.schema import validate
from perfsearch.pipeline.search import build_runner, settled

BATCH = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
DEEPSPEED = {
    "odd": {**BATCH, "zero_optimization": {"stage": 2, "reduce_bucket_size": 123_457}},
    "off": BATCH,
    "ahead": {
        **BATCH,
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 7,
            "sub_group_size": 1_000_001,
            "overlap_comm": False,
            "offload_param": {"device": "cpu"},
        },
    },
}
LAUNCH = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"
SCRIPT = ["train.py", "--bs", "24", "--acc", "3", "--dtype", "fp8", "--flag"]


def jobs():
    cores = len(os.sched_getaffinity(0))
    for nproc in (1, cores, 4 * cores):
        yield f"ddp of {nproc}", {"runner": {"name": "ddp", "device": "cpu"}, "nproc": nproc}
    for batch, micro in ((96, None), (120, 4), (14, 1)):
        runner = {"name": "zero", "device": "cpu", "micro_batch": micro}
        workload = {"name": "mlp", "global_batch": batch}
        yield f"zero of {batch}", {"runner": runner, "nproc": 2, "workload": workload}
    for name in DEEPSPEED:
        command = f"{LAUNCH} train.py --deepspeed_config {name}.json"
        workload = {"name": "script", "command": command}
        yield f"deepspeed {name}", {"runner": {"name": "deepspeed"}, "workload": workload}
    maps = ["micro_batch=--bs", "gradient_accumulation=--acc", "dtype=--dtype", "flag=--flag"]
    for nproc in (1, 2):
        workload = {"name": "script", "command": SCRIPT, "map": maps}
        yield (
            f"script of {nproc}",
            {"runner": {"name": "ddp", "device": "cpu"}, "workload": workload, "nproc": nproc},
        )


def built(plain):
    whole = {"strategy": {"name": "random"}, "workload": {"name": "mlp"}, **plain}
    return build_runner(settled(validate(whole)))


@pytest.mark.parametrize(("name", "plain"), [pytest.param(*job, id=job[0]) for job in jobs()])
@pytest.mark.parametrize("threads", ["1", "3", None])
def test_todays_value_of_each_knob_can_be_pinned(name, plain, threads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    (tmp_path / "train.py").write_text("")
    for file, content in DEEPSPEED.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    made = built(plain)
    today = {**made.pinned, **made.baseline}
    assert today
    for knob, value in today.items():
        pinned = built({**plain, "runner": {**plain["runner"], "knobs": {knob: value}}})
        assert knob not in pinned.space.by_name
        assert pinned.pinned.get(knob, value) == value
    everything = built({**plain, "runner": {**plain["runner"], "knobs": today}})
    assert not everything.space.knobs


@pytest.mark.parametrize("threads", ["1", "2"])
def test_todays_threads_can_be_pinned_on_a_machine_with_a_core_a_rank(threads, monkeypatch):
    """The only value that there is, or one beyond the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    cores = len(os.sched_getaffinity(0))
    runner = {"name": "ddp", "device": "cpu", "knobs": {"omp_num_threads": int(threads)}}
    made = built({"runner": runner, "nproc": cores})
    assert "omp_num_threads" in {**made.pinned, **made.left_out}
