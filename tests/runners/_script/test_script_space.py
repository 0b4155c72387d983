import dataclasses
import re

import pytest

from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Hardware, wrapper_parameters
from perfsearch.core.knob import Numerics, Scope
from perfsearch.core.narrow import SEARCH_ON_GPU, on_device
from perfsearch.instrument.facts import Facts
from perfsearch.knobs.script import ScriptJob, declare
from perfsearch.knobs.transport import Mapped
from perfsearch.runners._script.runner import sort_script_knobs

DDP = Facts(
    ["ddp"],
    1,
    ["AdamW"],
    {
        "bucket_cap_mb": 50.0,
        "first_bucket_mb": 50.0,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "find_unused_parameters": False,
        "dataloader_workers": 3,
        "persistent_workers": False,
        "pin_memory": False,
        "optimizer_implementation": "default",
    },
)
BATCH = (
    Mapped("micro_batch", "--bs"),
    Mapped("gradient_accumulation", "--accumulate", default=1),
)
SEARCHED = {"bucket_cap_mb": "search", "dataloader_workers": "search"}


def where(facts=DDP, arguments=(), maps=(), wanted=None, cores=8, device="cpu", **more):
    hardware = Hardware(device, 2, 1, (), cores)
    wanted = SEARCHED if wanted is None else wanted
    return ScriptJob(
        hardware,
        {},
        wrapper_parameters(),
        facts=facts,
        arguments=arguments,
        maps=maps,
        wanted=wanted,
        **more,
    )


def settled(*args, numerics=Numerics.REORDERED, **more):
    return sort_script_knobs(where(*args, **more), numerics)


def test_the_scripts_own_values_are_the_baseline():
    known = settled()
    assert known.baseline["bucket_cap_mb"] == 50.0
    assert known.baseline["dataloader_workers"] == 3
    assert known.space.by_name["dataloader_workers"].values == (0, 1, 2, 3, 4)
    assert known.changed(known.baseline) == {}
    assert known.changed({**known.baseline, "bucket_cap_mb": 8.0}) == {"bucket_cap_mb": 8.0}


def test_what_the_script_does_not_build_is_left_out_with_the_reason():
    known = settled(Facts(["fully_shard"], 0, ["SGD"], {"zero_stage": 3}))
    assert set(known.left_out) == {"bucket_cap_mb", "dataloader_workers"}
    assert "no DistributedDataParallel" in known.left_out["bucket_cap_mb"]
    assert "no DataLoader" in known.left_out["dataloader_workers"]


@pytest.mark.parametrize(
    ("facts", "scope"),
    [
        (Facts(["fully_shard"], values={"zero_stage": 3}), Scope.STEP),
        (Facts(["fsdp1"], values={"zero_stage": 2}), Scope.PROCESS),
    ],
)
def test_only_fully_shard_changes_its_stage_in_a_running_script(facts, scope):
    knob = {k.name: k for k in declare(where(facts))[0]}["zero_stage"]
    assert (knob.scope, knob.default) == (scope, facts.values["zero_stage"])


@pytest.mark.parametrize(
    ("today", "more", "values"),
    [
        (0, {}, (0, 1)),
        (1, {}, (0, 1)),
        (2, {}, None),
        (2, {"draws_in_loader": False}, (0, 1, 2, 4)),
    ],
)
def test_samples_that_workers_share_out_are_not_shared_out_otherwise(today, more, values):
    streamed = Facts(["ddp"], 1, [], {"dataloader_workers": today}, shared_out=True)
    found = settled(streamed, **more)
    knob = found.space.by_name.get("dataloader_workers")
    assert (knob and knob.values) == values
    assert ("dataloader_workers" in found.left_out) == (values is None)


def test_only_implementations_that_the_optimizer_has_are_searched():
    def found(names):
        facts = Facts(["ddp"], optimizers=["RMSprop"], implementations=names)
        knobs, absent = declare(where(facts))
        return {k.name: k.values for k in knobs}.get("optimizer_implementation"), absent

    assert found(["default", "foreach"])[0] == ("default", "foreach")
    assert "has no other" in found(["default"])[1]["optimizer_implementation"]
    assert found(None)[0] == ("default", "foreach", "fused")
    own = Facts(["ddp"], 0, ["Adam"], {"optimizer_implementation": "fused"})
    knob = {k.name: k for k in declare(where(own))[0]}["optimizer_implementation"]
    assert (knob.default, knob.values) == ("fused", ("foreach", "fused"))


def test_gradients_that_are_accumulated_leave_no_static_graph():
    facts = Facts(["ddp"], values={"static_graph": False}, accumulates=True)
    assert "no_sync" in declare(where(facts))[1]["static_graph"]
    assert "static_graph" in settled(DDP, wanted={"static_graph": "search"}).baseline


@pytest.mark.parametrize(
    ("maps", "wanted", "says"),
    [
        (BATCH, SEARCHED, []),
        (BATCH[:1], {}, ["--map micro_batch=--bs: .*map gradient_accumulation too"]),
        (BATCH[1:], {}, ["--map gradient_accumulation=--accumulate: it follows from micro_batch"]),
        ((Mapped("micro_batch", "--nope"),), {}, ["--nope: its value today is not among"]),
        ((Mapped("foo", "--foo"),), {}, ["--map foo=--foo: only 3 is known.*foo=.A,B."]),
        ((Mapped("foo", "--foo"),), {"foo": [3, 4]}, []),
        ((), {"zero_stage": 2}, ["runner.knobs.zero_stage=2: the script makes no FSDP module"]),
        ((), {"compile_mode": "default"}, ["runner.knobs.compile_mode=default: no torch module"]),
        ((), {"compile_mode": "none", "zero_stage": "search", "cpu_offload": False}, []),
        (BATCH, {"micro_batch": 8, "gradient_accumulation": 1}, []),
        (BATCH, {"micro_batch": 8, "gradient_accumulation": 2}, ["accumulation=2: it follows"]),
    ],
)
def test_what_was_asked_for_and_has_no_effect_is_told(maps, wanted, says):
    arguments = ["--bs", "4", "--accumulate", "2", "--foo", "3"]
    known = settled(DDP, arguments, maps, wanted)
    told = [
        f"{key}: {why}" for key, why in known.unsupported(wanted, [m.name for m in maps]).items()
    ]
    assert len(told) == len(says)
    for line, pattern in zip(told, says, strict=True):
        assert re.search(pattern, line), line


def test_a_loader_that_draws_is_not_searched_unless_altering():
    drawing = Facts(["ddp"], 1, [], {"dataloader_workers": 0}, draws_in_loader=True)
    assert "dataloader_workers" not in settled(drawing).baseline
    assert "altering" in settled(drawing).left_out["dataloader_workers"]
    assert "dataloader_workers" in settled(drawing, numerics=Numerics.ALTERING).baseline
    assert "dataloader_workers" in settled(drawing, draws_in_loader=False).baseline


def test_micro_batch_keeps_the_global_batch_by_accumulation():
    known = settled(arguments=["--bs", "8", "--accumulate", "2"], maps=BATCH)
    knob = known.space.by_name["micro_batch"]
    assert knob.values == (1, 2, 4, 8, 16) and knob.default == 8
    changed = known.changed({**known.baseline, "micro_batch": 4})
    assert changed == {"micro_batch": 4, "gradient_accumulation": 4}
    assert known.changed(known.baseline) == {}
    assert known.scope({"micro_batch", "gradient_accumulation"}) == {Scope.PROCESS}


def test_micro_batch_alone_needs_a_free_batch():
    only = where(arguments=["--bs=8"], maps=BATCH[:1])
    assert "map gradient_accumulation too" in declare(only)[1]["micro_batch"]
    free = settled(arguments=["--bs=8"], maps=BATCH[:1], free=True)
    assert free.space.by_name["micro_batch"].values == (2, 4, 8, 16, 32, 64)


def test_a_pinned_micro_batch_must_divide_the_share():
    known = settled(arguments=["--bs", "12"], maps=BATCH, wanted={**SEARCHED, "micro_batch": 4})
    assert known.changed(known.baseline) == {"micro_batch": 4, "gradient_accumulation": 3}
    with pytest.raises(BadInputError, match="does not divide the 12 samples"):
        known.changed({**known.baseline, "micro_batch": 5})


def test_any_argument_becomes_a_knob_with_the_users_values():
    maps = [Mapped("precision", "--precision")]
    known = settled(
        arguments=["--precision", "fp32"], maps=maps, wanted={"precision": ["fp32", "tf32"]}
    )
    assert known.space.by_name["precision"].values == ("fp32", "tf32")
    assert known.changed({"precision": "tf32"}) == {"precision": "tf32"}
    assert known.scope({"precision"}) == {Scope.PROCESS}


def test_knobs_that_no_file_names_are_searched_unless_all_is_named_by_hand():
    assert "persistent_workers" in settled().baseline
    by_hand = settled(wanted={"bucket_cap_mb": [1, 25, 50]})
    assert set(by_hand.baseline) == {"bucket_cap_mb"}
    assert by_hand.pinned["dataloader_workers"] == 3 and by_hand.changed({}) == {}


def test_looking_for_unused_parameters_can_only_be_turned_off():
    asks = Facts(["ddp"], values={"find_unused_parameters": True})
    names = {k.name for k in declare(where(asks))[0]}
    assert "find_unused_parameters" in names
    assert "find_unused_parameters" in declare(where())[1]


def test_threads_that_the_script_sets_itself_are_its_baseline():
    known = settled(
        Facts(["ddp"], values={"omp_num_threads": 3}), wanted={"omp_num_threads": [1, 3]}
    )
    assert known.baseline == {"omp_num_threads": 3}


def test_an_unknown_knob_is_refused_and_those_of_other_workloads_are_not():
    assert "compile_mode" in settled(wanted={**SEARCHED, "compile_mode": "none"}).left_out
    with pytest.raises(BadInputError, match="bucket_cap_m: no such knob"):
        settled(wanted={"bucket_cap_m": 1})


def test_whatever_is_not_searched_is_told_with_the_way_to_search_it():
    drawing = dataclasses.replace(DDP, draws_in_loader=True)
    maps = [*BATCH, Mapped("precision", "--precision")]
    wanted = {**SEARCHED, "zero_stage": 2}
    known = settled(drawing, ("--precision", "fp32"), maps, wanted)
    lines = known.left_out_lines(wanted)
    told = [line for line in lines if line.startswith("not searched: ")]
    (cannot, as_today) = lines[len(told) :]
    draws, micro, value = sorted(line for line in told if "gradient_acc" not in line)
    assert draws.startswith("not searched: dataloader_workers: its processes draw random numbers")
    assert "numerics=altering searches it" in draws and "workload.draws_in_loader=false" in draws
    assert micro.startswith("not searched: micro_batch: its value today is not among")
    assert value.startswith("not searched: precision: only today's value is known")
    head, _, rest = cannot.partition(" parameters: ")
    names = {
        name: why
        for listed, why in (part.removesuffix(")").split(" (", 1) for part in rest.split("; "))
        for name in listed.split(", ")
    }
    assert head == f"cannot apply here, {len(names)}"
    asked, _, untouched = as_today.partition("): ")
    assert asked.startswith("as today unless asked for (")
    assert asked.endswith(f"runner.knobs.{untouched.split(', ')[0]}=search")
    assert "gc_each_steps" in untouched.split(", ")
    assert names["zero_stage"] == "the script makes no FSDP module"
    assert names["nccl_algo"] == "NCCL is not used on a CPU, only with runner.device=cuda"
    left = known.not_searched(wanted).keys()
    assert left == names.keys() | {n for t in told for n in t.split(": ")[1].split(", ")}
    named = {name for line in told for name in line.split(": ")[1].split(", ")}
    assert not named & known.space.by_name.keys()


def test_shared_out_streams_are_told_as_such():
    known = settled(dataclasses.replace(DDP, shared_out=True))
    assert "share out a stream" in known.left_out_lines(SEARCHED)[0]


ONE_GPU = Hardware("cuda", 1, 1, (), 8)


def test_one_rank_has_no_knobs_of_what_ranks_exchange():
    job = dataclasses.replace(where(device="cuda"), machine=ONE_GPU)
    names, absent = {k.name for k in declare(job)[0]}, declare(job)[1]
    exchanged = {"bucket_cap_mb", "first_bucket_mb", *(n for n in absent if n.startswith("nccl_"))}
    assert {absent[name] for name in exchanged} == {"one rank exchanges nothing with others"}
    assert len(exchanged) == 9 and "gradient_as_bucket_view" in names


@pytest.mark.parametrize(("seen", "offered"), [(True, True), (None, True), (False, False)])
def test_convolutions_are_tuned_where_there_may_be_some(seen, offered):
    job = where(dataclasses.replace(DDP, convolutional=seen), device="cuda")
    there, absent = declare(job)
    assert ("cudnn_benchmark" in {k.name for k in there}) == offered
    assert absent.get("cudnn_benchmark", "").startswith("the model has no conv") != offered


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        (Facts(attention=["flash"]), ("default", "flash", "efficient", "cudnn", "math")),
        (Facts(attention=None), ("default", "flash", "efficient", "cudnn", "math")),
        (Facts(attention=[]), None),
        (Facts(attention=["flash"], compiled=True), None),
        (Facts(values={"attention_backend": "math"}, attention=[]), "math"),
        (Facts(values={"attention_backend": "cudnn"}, attention=["cudnn"]), "cudnn"),
    ],
)
def test_attention_is_tuned_where_its_kernels_are_used(facts, values):
    there, absent = declare(where(facts, device="cuda"))
    knob = {k.name: k for k in there}.get("attention_backend")
    if isinstance(values, str):
        assert knob.default == values
    else:
        assert (knob and knob.values) == values
    assert (knob is None) == ("attention_backend" in absent)


def test_precision_is_searched_only_where_results_may_change():
    facts = Facts(values={"float32_matmul_precision": "highest"})
    wanted = {"float32_matmul_precision": "search"}
    known = settled(facts, wanted=wanted, device="cuda")
    assert "it is altering" in known.left_out["float32_matmul_precision"]
    assert "numerics=altering searches it" in known.left_out["float32_matmul_precision"]
    allowed = settled(facts, wanted=wanted, device="cuda", numerics=Numerics.ALTERING)
    assert allowed.space.by_name["float32_matmul_precision"].values == ("highest", "high")
    assert "on a CPU" in settled(facts, wanted=wanted).left_out["float32_matmul_precision"]


@pytest.mark.parametrize(
    ("more", "layout", "compiles"),
    [
        ({"images": True}, "", ""),
        ({"images": True, "wrappers": ["ddp"]}, "", ""),
        ({"images": False}, "the model has no convolutions", ""),
        ({"images": True, "compiled": True}, "compiles its model itself", "compiles its model"),
        ({"images": True, "wrappers": ["fully_shard"]}, "its model is sharded", "is sharded"),
        ({"modules": 0}, "no torch module was seen", "no torch module was seen"),
    ],
)
def test_layout_and_compiling_are_there_where_modules_are_trained(more, layout, compiles):
    there, absent = declare(where(Facts(**{"modules": 1, **more})))
    scopes = {k.name: k.scope for k in there}
    for name, why, scope in (
        ("channels_last", layout, Scope.STEP),
        ("compile_mode", compiles, Scope.PROCESS),
    ):
        assert why in absent.get(name, "") and (name in absent) == bool(why)
        assert scopes.get(name, scope) == scope


def test_compiling_is_searched_where_it_is_asked_for_and_minutes_of_it_where_they_are_named():
    facts = Facts(modules=1, images=True)
    files = {"compile_mode": "none", "channels_last": "search"}
    assert set(settled(facts, wanted=files).space.by_name) >= {"channels_last"}
    assert "compile_mode" not in settled(facts, wanted=files).space.by_name
    asked = settled(facts, wanted={**files, "compile_mode": "search"})
    assert asked.space.by_name["compile_mode"].values == ("none", "default")
    assert asked.scope({"compile_mode"}) == {Scope.PROCESS}
    modes = ["none", "max-autotune"]
    named = settled(facts, wanted={**files, "compile_mode": modes})
    assert named.space.by_name["compile_mode"].values == tuple(modes)


@pytest.mark.parametrize(
    ("on_gpu", "searched"), [(True, {"a": "search", "b": 3}), (False, {"a": "none", "b": 3})]
)
def test_what_is_searched_on_gpus_is_left_alone_elsewhere(on_gpu, searched):
    assert on_device({"a": SEARCH_ON_GPU, "b": 3}, {"a": "none", "b": 1}, on_gpu) == searched


@pytest.mark.parametrize(
    ("blocks", "wanted", "searched", "why"),
    [
        (12, ["none", "default"], {"compile_mode": ("default", "max-autotune")}, ""),
        (12, "default", {}, ""),
        (12, "none", None, ""),
        (None, ["none", "default"], {"compile_mode": ("default", "max-autotune")}, ""),
        (0, ["none", "default"], None, "the model repeats no block"),
    ],
)
def test_blocks_are_compiled_where_a_model_repeats_some(blocks, wanted, searched, why):
    facts = Facts(modules=1, blocks=blocks)
    known = settled(facts, wanted={"compile_mode": wanted, "compile_scope": "search"})
    knob = known.space.by_name.get("compile_scope")
    assert (knob and dict(knob.when)) == searched
    assert known.left_out.get("compile_scope", "") == why
    assert why or known.declared["compile_scope"].default == "model"
    assert not known.unsupported({"compile_scope": "search"}, [])
