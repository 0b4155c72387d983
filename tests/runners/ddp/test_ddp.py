import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import perfsearch.conf
from perfsearch.core.hardware import Environment, Gpu, Hardware, threads_today, wrapper_parameters
from perfsearch.core.knob import Numerics, Scope
from perfsearch.core.narrow import KnobError
from perfsearch.knobs import effect_order, nccl, of
from perfsearch.knobs.base import Job, Use, declare
from perfsearch.runners.ddp import export
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workloads.spec import TRAITS, WorkloadSpec

CARDS = tuple(Gpu(f"GPU-{i}", "Fake 9000", 80.0) for i in range(4))
FOUR_GPUS = Hardware("cuda", 4, 1, CARDS, cores=64)
TWO_RANKS = Hardware("cpu", 2, 1, (), cores=8)
PLAIN = frozenset({"bucket_cap_mb", "gradient_as_bucket_view", "static_graph"})
TODAY = PLAIN | {"bucket_cap_mb_list"}


def declared(hardware, workload="gpt", environ=None, takes=TODAY):
    environ, traits = environ or {}, TRAITS[workload]
    job = Job(
        hardware,
        environ,
        takes,
        threads_today(environ, hardware),
        traits.convolutional,
        traits.draws_in_loader,
        attends=traits.attends,
        repeats=traits.repeats,
    )
    knobs, absent = declare(of(Use.DDP), job)
    return {k.name: k for k in knobs}, absent


def yaml_knobs():
    path = Path(perfsearch.conf.__file__).parent / "runner" / "ddp.yaml"
    return OmegaConf.to_container(OmegaConf.load(path))


@pytest.mark.parametrize("hardware", [FOUR_GPUS, TWO_RANKS])
@pytest.mark.parametrize("workload", sorted(TRAITS))
def test_every_knob_is_declared_or_absent_with_a_reason(hardware, workload):
    knobs, absent = declared(hardware, workload)
    assert not set(knobs) & set(absent)
    assert {*knobs, *absent} == set(effect_order(Use.DDP))
    assert all(absent.values())
    assert all(k.contains(k.default) for k in knobs.values())


def test_options_file_names_exactly_the_knobs():
    values = yaml_knobs()
    assert values["name"] == "ddp"
    assert set(values["knobs"]) == set(effect_order(Use.DDP))
    assert values["knobs"] == dict(DDP.Options().knobs)


def test_what_the_installed_torch_lacks_is_detected():
    assert "first_bucket_mb" in declared(TWO_RANKS)[0]
    knobs, absent = declared(TWO_RANKS, takes=PLAIN - {"static_graph"})
    assert "first_bucket_mb" not in knobs
    assert absent["static_graph"] == "the installed torch lacks it"
    assert {"bucket_cap_mb", "gradient_as_bucket_view"} <= wrapper_parameters()


def test_knobs_follow_hardware_and_workload():
    on_gpu, _ = declared(FOUR_GPUS, "resnet")
    on_cpu, _ = declared(TWO_RANKS, "gpt")
    assert {"channels_last", "cudnn_benchmark", "pin_memory", "nccl_algo"} <= set(on_gpu)
    assert "nccl_nsocks_perthread" not in on_gpu
    assert on_gpu["hierarchical_group_size"].values == (0, 2)
    assert not {n for n in on_cpu if n.startswith("nccl")}
    assert on_cpu["omp_num_threads"].values == (1, 2, 4)
    assert on_cpu["dataloader_workers"].values == (0, 1, 2, 4)


def test_sockets_matter_where_connections_go_over_them():
    tcp = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    knobs, _ = declared(FOUR_GPUS, environ=tcp)
    assert knobs["nccl_nsocks_perthread"].scope is Scope.PROCESS
    assert "nccl_socket_nthreads" in declared(replace(FOUR_GPUS, nnodes=2))[0]
    (rule,) = nccl.constraints(["nccl_nsocks_perthread"], {"nccl_socket_nthreads": 16})
    assert rule.holds({"nccl_nsocks_perthread": 4})
    assert not rule.holds({"nccl_nsocks_perthread": 8})


def test_the_baseline_is_what_the_user_has_set():
    knobs, _ = declared(FOUR_GPUS, environ={"NCCL_BUFFSIZE": "123", "NCCL_ALGO": "Tree"})
    assert knobs["nccl_buffsize"].default == 123
    assert knobs["nccl_algo"].default == "Tree"
    assert None not in knobs["nccl_algo"].values  # it could not be unset from within
    assert declared(TWO_RANKS, environ={"OMP_NUM_THREADS": "3"})[0]["omp_num_threads"].default == 3
    assert declared(TWO_RANKS)[0]["omp_num_threads"].default == 1


def test_loader_processes_alter_what_a_drawing_loader_gives():
    assert declared(TWO_RANKS, "custom")[0]["dataloader_workers"].numerics is Numerics.ALTERING
    assert declared(TWO_RANKS, "gpt")[0]["dataloader_workers"].numerics is Numerics.EXACT


def runner(tmp_path, knobs=None, workload=None, **environment):
    options = DDP.Options(device="cpu", knobs=yaml_knobs()["knobs"] if knobs is None else knobs)
    return DDP(options, workload or WorkloadSpec("gpt"), Environment(tmp_path, **environment))


def test_pins_apply_to_the_baseline_too(tmp_path):
    made = runner(tmp_path, {"bucket_cap_mb": 8, "static_graph": [True, False]})
    assert made.pinned["bucket_cap_mb"] == 8
    assert made.baseline == {"static_graph": False}
    assert made.space.feasible(made.baseline)


def test_what_is_in_force_today_can_be_pinned_where_it_is_the_only_value(tmp_path):
    every_core = len(os.sched_getaffinity(0))
    made = runner(tmp_path, {"omp_num_threads": 1, "bucket_cap_mb": 8}, nproc=every_core)
    only = f"{every_core} ranks on {every_core} cores leave one"
    assert made.left_out == {"omp_num_threads": only}
    with pytest.raises(KnobError, match=f"omp_num_threads=2: {only}"):
        runner(tmp_path, {"omp_num_threads": 2}, nproc=every_core)
    with pytest.raises(KnobError, match=f"omp_num_threads=True: {only}"):
        runner(tmp_path, {"omp_num_threads": True}, nproc=every_core)
    for ranks in (1, every_core):
        usual = runner(tmp_path, nproc=ranks)
        today = {record.name: record.default for record in of(Use.DDP)}
        today |= {name: knob.default for name, knob in usual.declared.items()}
        for name, value in today.items():
            made = runner(tmp_path, {name: value}, nproc=ranks)
            assert name in made.pinned.keys() | made.left_out.keys()


def test_default_space(tmp_path):
    made = runner(tmp_path)
    assert made.space.feasible(made.baseline)
    assert made.pinned["compile_mode"] == "none"
    assert made.pinned["compile_scope"] == "model"  # as nothing is compiled
    assert "nccl_algo" in made.left_out
    assert made.hints([]).effect_order[0] == "bucket_cap_mb"
    assert made.device_set() == "cpu"
    assert made.identity()["world_size"] == "2"
    assert made.devices == 2


def test_blocks_are_compiled_where_a_workload_repeats_some_and_compiling_was_asked_for(tmp_path):
    wanted = {"compile_mode": ["none", "default"], "compile_scope": "search"}
    space = runner(tmp_path, wanted).space
    assert space.by_name["compile_scope"].values == ("model", "blocks")
    plainly = space.canonical({"compile_mode": "none", "compile_scope": "blocks"})
    assert plainly["compile_scope"] == "model"
    other = runner(tmp_path, wanted, WorkloadSpec("mlp"))
    assert other.left_out["compile_scope"] == "the model repeats no block"
    custom = WorkloadSpec("custom", options={"repeats": True}).traits
    assert custom.repeats and not TRAITS["custom"].repeats


def test_numerics_bound_what_is_searched(tmp_path):
    made = runner(tmp_path, numerics=Numerics.EXACT)
    assert "bucket_cap_mb" not in made.space.by_name
    assert made.left_out["bucket_cap_mb"] == "it is reordered and numerics=exact"
    assert "gradient_as_bucket_view" in made.space.by_name


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"bucket_cap": 3}, "runner.knobs.bucket_cap: no such knob. Did you mean 'bucket_cap_mb'"),
        (
            {"nccl_algo": "Ring"},
            "nccl_algo=Ring: NCCL is not used on a CPU, only with runner.device=cuda. Leave the",
        ),
        ({"bucket_cap_mb": 0}, "runner.knobs.bucket_cap_mb=0: allowed is 1 to 512 MiB"),
        ({"compile_mode": "fast"}, "runner.knobs.compile_mode=fast: allowed: none, default"),
    ],
)
def test_impossible_knobs_are_refused(tmp_path, knobs, message):
    with pytest.raises(KnobError, match=message):
        runner(tmp_path, knobs)


def test_group_spec_carries_process_scope_only(tmp_path, monkeypatch):
    monkeypatch.setattr("perfsearch.core.hardware.visible_gpus", lambda: list(CARDS))
    monkeypatch.setattr("perfsearch.core.hardware.torch_version", lambda: "2.13.0")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    made = DDP(DDP.Options(), WorkloadSpec("gpt"), Environment(tmp_path))
    base = made._group_spec({**made.pinned, **made.baseline})
    other = made._group_spec({**made.pinned, **made.baseline, "nccl_nsocks_perthread": 4})
    algo = made._group_spec({**made.pinned, **made.baseline, "nccl_algo": "Ring"})
    assert base.env["OMP_NUM_THREADS"] == "1"
    assert "NCCL_NSOCKS_PERTHREAD" not in base.env
    assert other.env["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert base.key == algo.key != other.key
    assert base.capture_nccl
    assert made.device_set() == "GPU-0,GPU-1,GPU-2,GPU-3"


def test_exports_say_the_same_without_perfsearch(tmp_path):
    made = runner(tmp_path)
    files = made.export({**made.baseline, "bucket_cap_mb": 8.0}, tmp_path / "apply")
    assert [f.name for f in files] == ["env.sh", "ddp.py"]
    script = files[0].read_text()
    assert "export OMP_NUM_THREADS=1" in script
    assert "torchrun --standalone --nproc-per-node=2 train.py" in script
    assert "bucket_cap_mb_list=[1.0, 8.0]" in files[1].read_text()


def test_environment_lines_can_be_sourced(tmp_path):
    configuration = {"nccl_algo": "allreduce:tree;x y", "nccl_buffsize": 1024, "nccl_proto": None}
    path = tmp_path / "env.sh"
    path.write_text(export.environment_script(configuration, FOUR_GPUS, 1))
    command = f'. {path}; printf "%s|%s|%s" "$NCCL_ALGO" "$NCCL_BUFFSIZE" "$NCCL_PROTO"'
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout == "allreduce:tree;x y|1024|"


def test_exported_lines_compile_the_blocks(monkeypatch):
    torch = pytest.importorskip("torch")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, mode: compiled.append(mode) or call)
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    configuration = {"compile_mode": "max-autotune", "compile_scope": "blocks"}
    text = export.code(configuration, "cpu")
    exec(text.partition("model = DistributedDataParallel(")[0], {"model": model})
    assert compiled == ["max-autotune"] * 3
    assert all(block._compiled_call_impl is not None for block in model.layers)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_exported_code_is_python(device):
    configuration = {
        "bucket_cap_mb": 64.0,
        "first_bucket_mb": 4.0,
        "static_graph": True,
        "hierarchical_group_size": 2,
        "compile_mode": "max-autotune",
        "channels_last": True,
        "cudnn_benchmark": True,
        "attention_backend": "flash",
        "gc_each_steps": 10,
        "float32_matmul_precision": "high",
        "optimizer_implementation": "foreach",
        "dataloader_workers": 2,
        "prefetch_factor": 4,
        "pin_memory": True,
    }
    text = export.code(configuration, device)
    ast.parse(text)
    assert "static_graph=True" in text
    for line in ("gc.disable()", "cudnn.benchmark = True", "cuda.enable_mem_efficient_sdp(False)",
                 "set_float32_matmul_precision('high')"):  # fmt: skip
        assert f"{line}\n" in text
    assert "hierarchical_all_reduce(2)" in text
    assert "num_workers=2, prefetch_factor=4, pin_memory=True" in text
    assert ("device_ids" in text) == (device == "cuda")


def test_the_controller_side_imports_no_torch(tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from perfsearch.runners.ddp.runner import *\n"
        f"made = DDP(DDP.Options(), WorkloadSpec('gpt'), Environment(Path({str(tmp_path)!r})))\n"
        "made.export(made.baseline, Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'hydra', 'mlflow', 'sklearn', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_rank_side_imports_nothing_of_the_controllers():
    script = (
        "import sys\nimport perfsearch.workers.rank, perfsearch.workers.trial\n"
        "import perfsearch.training.ddp, perfsearch.workloads.gpt, perfsearch.workloads.custom\n"
        "unwanted = {'hydra', 'mlflow', 'sklearn', 'omegaconf', 'rich', 'nevergrad'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_variable_is_a_knob():
    assert set(nccl.VARIABLES) <= set(effect_order(Use.DDP))
