"""What ``runner=zero`` hands over."""

import ast
import importlib.util
import json
from dataclasses import replace

import pytest
import yaml
from support.zero_cases import make, trial

from perfsearch.core.trial import Status
from perfsearch.runners.zero import forms
from perfsearch.runners.zero.export import left_out_notes


@pytest.fixture
def _loadable(monkeypatch):
    """Every framework loads what is made for it, as far as that is seen here."""
    monkeypatch.setattr(forms, "why_not_handed_over", lambda *_: "")


def exported(tmp_path, device="cpu", **configuration):
    runner = make(knobs={"zero_stage": "search", "blocks_per_unit": 1})
    runner.hardware = replace(runner.hardware, device=device)
    trials = [trial(0, {"zero_stage": 0}, 50.0), trial(1, {"zero_stage": 2}, 40.0),
              trial(2, {"zero_stage": 3}, status=Status.OOM)]  # fmt: skip
    trials[1].cost, trials[1].objective, trials[1].seconds = 0.05 / 64, 1280.0, 2.5
    runner.hints(trials)
    whole = {**runner.pinned, "zero_stage": 0, **configuration}
    files = runner.export(whole, tmp_path)
    assert all(path.exists() for path in files)
    return {path.name: path.read_text() for path in files}


@pytest.mark.usefixtures("_loadable")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_the_torch_form_is_python(tmp_path, stage, every):
    files = exported(
        tmp_path, zero_stage=stage, activation_checkpointing=every, micro_batch=8,
        blocks_per_unit=2, forward_prefetch=1, backward_prefetch=1, shard_group_size=2,
    )  # fmt: skip
    tree = ast.parse(files["zero.py"])
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert names == ["build", "train_step"]
    deepspeed = json.loads(files["ds_config.json"])
    assert deepspeed["train_batch_size"] == 64
    assert deepspeed["train_micro_batch_size_per_gpu"] == 8
    assert deepspeed["gradient_accumulation_steps"] == 2
    assert deepspeed["zero_optimization"]["stage"] == stage
    assert ("hf_trainer_args.json" in files) == (not every and stage == 0)
    if every:
        assert "not every second or fourth" in files["notes.txt"]


@pytest.mark.usefixtures("_loadable")
def test_trainer_and_accelerate_get_what_they_can_say(tmp_path):
    files = exported(tmp_path, "cuda", zero_stage=3, activation_checkpointing=1, micro_batch=4)
    trainer = json.loads(files["hf_trainer_args.json"])
    assert trainer["fsdp"] is True
    assert trainer["gradient_accumulation_steps"] == 4
    assert trainer["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["Block"]
    accelerate = yaml.safe_load(files["accelerate_fsdp.yaml"])
    assert accelerate["fsdp_config"]["fsdp_version"] == 2
    assert accelerate["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert accelerate["num_processes"] == 4
    assert "gradient_accumulation_steps=4" in files["notes.txt"]
    assert "load batches of 4" in files["notes.txt"]
    assert "wrap every block as zero.py does" in files["notes.txt"]


STAND_INS = {
    "transformers": """
class TrainingArguments:
    def __init__(self, output_dir, use_cpu=False, bf16=False, **given):
        assert not set(given) - {"per_device_train_batch_size", "gradient_accumulation_steps"}
        self.per_device_train_batch_size = given["per_device_train_batch_size"]
        self.gradient_accumulation_steps = ACCUMULATION or given["gradient_accumulation_steps"]
        self.bf16, self.gradient_checkpointing = bf16, False
""",
    "deepspeed": "",
    "deepspeed.runtime": "",
    "deepspeed.runtime.config": "class DeepSpeedConfig:\n    def __init__(self, _): FAILS",
}


@pytest.mark.parametrize(
    ("accumulation", "why"),
    [
        (0, ""),
        (7, "transformers makes another configuration of it: gradient_accumulation=7 for 4"),
        ("undefined", "transformers does not load it: NameError: name 'undefined' is not defined"),
    ],
)
def test_a_form_is_written_only_where_it_was_loaded_and_says_what_was_measured(
    tmp_path, monkeypatch, accumulation, why
):
    place = tmp_path / "stand_in"
    for name, text in STAND_INS.items():
        file = place.joinpath(*name.split(".")) / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("ACCUMULATION", str(accumulation)))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setitem(forms.PACKAGES, "accelerate_fsdp.yaml", "no_such_package")
    files = exported(tmp_path / "apply", micro_batch=4)
    notes = files["notes.txt"].splitlines()
    assert ("hf_trainer_args.json" in files) == (not why)
    assert "ds_config.json" not in files
    assert any(n.startswith("ds_config.json is not written: deepspeed does not") for n in notes)
    said = [n for n in notes if n.startswith("hf_trainer_args.json is not written")]
    assert said == ([f"hf_trainer_args.json is not written: {why}"] if why else [])


def test_without_its_framework_no_form_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(forms.importlib.util, "find_spec", lambda name: None)
    files = exported(tmp_path, "cuda", zero_stage=3, micro_batch=4)
    assert set(files) == {"zero.py", "summary.txt", "notes.txt"}
    for name, package in forms.PACKAGES.items():
        line = f"{name} is not written: {package} is not installed here, so that it could not be"
        assert line in files["notes.txt"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_installed_frameworks_load_what_is_written(tmp_path, monkeypatch, device, stage):
    here = {name for name, package in forms.PACKAGES.items() if importlib.util.find_spec(package)}
    if not here:
        pytest.skip("none of deepspeed, transformers and accelerate is installed")
    files = exported(tmp_path, device, zero_stage=stage, micro_batch=4)
    expected = {"ds_config.json", "hf_trainer_args.json", "accelerate_fsdp.yaml"}
    if stage < 2 or device == "cpu":
        expected -= {"accelerate_fsdp.yaml"}
    if stage >= 2 or device == "cuda":  # Trainer refuses bf16 of a GPU where there is none
        expected -= {"hf_trainer_args.json"}
    assert expected & here <= set(files), files["notes.txt"]


LOADED_BY_ACCELERATE = {
    "compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes",
    "use_cpu", "fsdp_config",
}  # fmt: skip


@pytest.mark.usefixtures("_loadable")
@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_knows_every_key_of_its_file(tmp_path, stage):
    files = exported(tmp_path, "cuda", zero_stage=stage, micro_batch=4)
    assert set(yaml.safe_load(files["accelerate_fsdp.yaml"])) == LOADED_BY_ACCELERATE
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    loaded = config_args.load_config_from_file(str(tmp_path / "accelerate_fsdp.yaml"))
    assert loaded.num_processes == 4
    assert loaded.fsdp_config["fsdp_reshard_after_forward"] is (stage == 3)


@pytest.mark.usefixtures("_loadable")
def test_trainer_takes_arguments_found_on_cpus(tmp_path):
    trainer = json.loads(exported(tmp_path, micro_batch=4)["hf_trainer_args.json"])
    assert trainer["use_cpu"] is True  # without it Trainer looks for a GPU, and refuses bf16
    transformers = pytest.importorskip("transformers")
    made = transformers.TrainingArguments(str(tmp_path), **trainer)
    assert made.gradient_accumulation_steps == 4


@pytest.mark.parametrize("stage", [2, 3])
def test_no_form_is_written_that_would_not_shard(tmp_path, stage):
    """On a CPU Accelerate starts trainings apart, and Trainer trains plain copies."""
    files = exported(tmp_path, zero_stage=stage)
    assert not {"hf_trainer_args.json", "accelerate_fsdp.yaml"} & files.keys()
    assert files["notes.txt"].count("is not written: it shards on GPUs alone") == 2
    assert "zero.py" in files


@pytest.mark.usefixtures("_loadable")
def test_what_a_form_has_no_place_for_is_named_with_what_it_costs(tmp_path):
    lost = {
        "forward_prefetch": 2, "backward_prefetch": 1, "optimizer_implementation": "fused",
        "mixed_precision": "autocast",
    }  # fmt: skip
    notes = exported(tmp_path, "cuda", zero_stage=3, micro_batch=4, **lost)["notes.txt"]
    for form in ("ds_config.json", "hf_trainer_args.json", "accelerate_fsdp.yaml"):
        (line,) = [ln for ln in notes.splitlines() if ln.startswith(f"{form} has no place for fo")]
        assert all(f"{name}={value}" in line for name, value in lost.items())
        assert line.endswith("what that costs was not measured")
    more = {"gradient_sync_each": True, "blocks_per_unit": 2, "shard_group_size": 2}
    notes = exported(tmp_path, "cuda", zero_stage=2, **more)["notes.txt"]
    (line,) = [ln for ln in notes.splitlines() if ln.startswith("ds_config.json has no place")]
    assert all(f"{name}={str(value).lower()}" in line for name, value in more.items())


def test_the_cost_of_what_is_left_out_is_that_of_the_search():
    whole = {"zero_stage": 3, "forward_prefetch": 2, "micro_batch": 4}
    fast, slow = trial(0, {"forward_prefetch": 2}, 50.0), trial(1, {"forward_prefetch": 0}, 60.0)
    fast.cost, slow.cost = 0.05, 0.06
    (line,) = left_out_notes("f", {"zero_stage", "micro_batch"}, whole, [fast, slow])
    assert line == (
        "f has no place for forward_prefetch=2: without, a step took +20.0% in this search"
    )
    assert list(left_out_notes("f", {"zero_stage", "micro_batch"}, {"zero_stage": 3}, [])) == []


def test_the_summary_names_what_is_pinned(tmp_path):
    runner = make(knobs={"zero_stage": 3, "micro_batch": 4, "activation_checkpointing": "search"})
    done = trial(0, {"activation_checkpointing": 0}, 50.0)
    done.cost, done.objective = 0.05 / 64, 1280.0
    runner.hints([done])
    runner.export(runner.baseline, tmp_path)
    rows = (tmp_path / "summary.txt").read_text().splitlines()
    assert rows[1].split() == ["z3", "1", "1280.00", "z3_tmbspg4", "(trial", "0)"]


def test_the_summary_has_a_row_for_each_space_and_the_total_time(tmp_path):
    text = exported(tmp_path, zero_stage=2)["summary.txt"]
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["tuning_space"] == [
        "tuning_space", "num_experiments", "best_metric_val", "best_exp_name"
    ]  # fmt: skip
    assert rows["z2"][:3] == ["z2", "1", "1280.00"]
    assert rows["z3"] == ["z3", "1", "none", "none"]
    assert rows["all"][1:3] == ["3", "1280.00"]
    assert "Tuning took 2.5 s in 3 experiments" in text
