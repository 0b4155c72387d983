"""``fully_shard`` as Accelerate and HF Trainer call it: seen, read back, and changed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from support.started_scripts import losses, run

from perfsearch.instrument.fsdp import resharding
from perfsearch.runners._script import export
from perfsearch.runners._script.ways import Way

DATA = Path(__file__).parents[1] / "data" / "scripts"
ON_CPU, PLUGIN = str(DATA / "fsdp_on_cpu.py"), str(DATA / "accelerate_plugin.py")
TRAINER = str(Path(__file__).parents[2] / "examples" / "scripts" / "hf_trainer.py")


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}")


def made(text):
    """Sharded modules, those that stay whole after the forward pass, and what each has ahead."""
    units, whole, ahead = re.search(r"units (\d+) whole (\d+) ahead (.*)", text).groups()
    return int(units), int(whole), json.loads(ahead)


@pytest.mark.parametrize(
    ("own", "stage", "grouped", "given"),
    [
        (True, None, False, True),
        (True, 2, False, False),
        (None, 2, False, False),
        (None, 3, False, None),  # torch keeps the outermost module whole
        (False, 3, False, True),
        (False, 3, True, False),  # the last modules of the forward pass
        (False, 2, True, False),
        (4, 3, False, 4),
        (4, 2, False, False),
    ],
)
def test_a_stage_is_given_to_what_it_is_about(own, stage, grouped, given):
    assert resharding(own, stage, grouped) is given


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the untouched script, and what it says could be changed."""
    directory = tmp_path_factory.mktemp("plain")
    return run(
        directory, "-m", "perfsearch.cli.run", "--nproc-per-node=2", ON_CPU, PLUGIN, "--steps", "4"
    )


@pytest.mark.slow
@needs("accelerate")
def test_accelerates_plugin_is_seen_with_its_values(plain):
    printed, told = plain
    assert made(printed)[:2] == (7, 2)  # the norm and the head, as a group
    for value in ("zero_stage=3", "forward_prefetch=0", "backward_prefetch=0", "cpu_offload=false"):
        assert value in told
    assert "bucket_cap_mb" not in told


@pytest.mark.slow
@needs("accelerate")
@pytest.mark.parametrize(
    ("knobs", "options", "whole", "ahead"),
    [
        ({"zero_stage": 2, "forward_prefetch": 1, "cpu_offload": True}, [], 6,
         [0, 1, 1, 1, 1, 0, 0]),
        ({"zero_stage": 3, "forward_prefetch": 2, "backward_prefetch": 1}, ["--whole"], 2,
         [0, 2, 2, 2, 1, 0, 0]),
    ],
)  # fmt: skip
def test_knobs_reach_the_plugins_modules_with_and_without_perfsearch(
    plain, tmp_path, knobs, options, whole, ahead
):
    command = [ON_CPU, PLUGIN, "--steps", "4", *options]
    (tmp_path / "knobs.yaml").write_text(json.dumps(knobs))
    start = ["-m", "perfsearch.cli.run", "--nproc-per-node=2", "--knobs", "knobs.yaml"]
    tuned, told = run(tmp_path, *start, *command)
    assert "without effect" not in told
    for name, value in knobs.items():
        assert f"{name}={str(value).lower()} (fully_shard)" in told
    way = Way(2, by_torchrun=True)
    export.export_files(knobs, [], way, 1, command, False, ["fully_shard"], tmp_path)
    start = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(tmp_path / "start.py")]
    alone, _ = run(tmp_path, *start, *command)
    for printed in (tuned, alone):
        assert losses(printed) == pytest.approx(losses(plain[0]), rel=1e-5)
        assert made(printed) == (7, whole, ahead)


TRAINING = ["--output_dir", "out", "--max_steps", "4", "--report_to", "none", "--save_strategy",
            "no", "--fsdp", "full_shard", "--fsdp_config", "fsdp.json"]  # fmt: skip
FSDP_CONFIG = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}


GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.slow
@needs("transformers", "accelerate")
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=GPUS)])
def test_the_trainer_with_fsdp_2_trains_the_same_tuned_and_untuned(tmp_path, where):
    (tmp_path / "fsdp.json").write_text(json.dumps(FSDP_CONFIG))
    knobs = {"zero_stage": 2, "forward_prefetch": 1, "micro_batch": 4, "gradient_accumulation": 2}
    if where == "cuda":
        knobs["cpu_offload"] = True
    (tmp_path / "knobs.yaml").write_text(json.dumps(knobs))
    command = [TRAINER, *TRAINING]
    if where == "cpu":
        command = [ON_CPU, *command, "--use_cpu", "True", "--ddp_backend", "gloo"]
    start = ["-m", "perfsearch.cli.run", "--nproc-per-node=2"]
    plain, offered = run(tmp_path, *start, *command)
    tuned, told = run(tmp_path, *start, "--knobs", "knobs.yaml", "--preset", "hf-trainer", *command)
    assert "zero_stage=3" in offered and "bucket_cap_mb" not in offered
    assert "without effect" not in told
    assert "zero_stage=2 (fully_shard)" in told and "forward_prefetch=1 (fully_shard)" in told
    assert losses(plain) and losses(tuned) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_on_the_cpu_the_trainer_takes_ddp_by_itself(tmp_path):
    """Accelerate drops the plugin there: what is offered is what is really made."""
    (tmp_path / "fsdp.json").write_text(json.dumps(FSDP_CONFIG))
    (tmp_path / "once.py").write_text(
        "import os, runpy, sys\nsys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "os._exit(0)  # torch's own threads now and then abort a process that takes them down\n"
    )
    start = ["-m", "perfsearch.cli.run", "--nproc-per-node=2", "once.py", TRAINER, *TRAINING]
    _, offered = run(tmp_path, *start, "--use_cpu", "True", "--ddp_backend", "gloo")
    assert "bucket_cap_mb" in offered and "zero_stage" not in offered
