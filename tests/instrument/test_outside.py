"""What is said of services that a script sends to."""

import pytest

from perfsearch.instrument.outside import caution, cautions, find_programs, find_services


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import wandb", {"wandb": "WANDB_MODE=offline"}),
        ("def f():\n    from wandb.sdk import x", {"wandb": "WANDB_MODE=offline"}),
        ("try:\n    import boto3, os\nexcept ImportError:\n    pass", {"boto3": ""}),
        ("from google.cloud import storage", {"google.cloud.storage": ""}),
        ("import google.cloud.storage as s", {"google.cloud.storage": ""}),
        ("import google.cloud.vision", {}),
        ("from huggingface_hub import hf_hub_download", {}),
        ("from huggingface_hub import HfApi", {"huggingface_hub": "HF_HUB_OFFLINE=1"}),
        ("model.push_to_hub('x')", {"push_to_hub": ""}),
        ("import requests\nrequests.post('x')", {"requests.post": ""}),
        ("import requests\nrequests.get('x')", {}),
        ("from requests import post", {"requests.post": ""}),
        ("# import wandb\ntext = 'import wandb'\nimport wandbox", {}),
        ("import mlflow", {"mlflow": "MLFLOW_TRACKING_URI=sqlite:////tmp/trials.db"}),
        ("import mlflow\nmlflow.set_tracking_uri('sqlite:///own.db')", {"mlflow": ""}),
        ("from .wandb import x", {}),
        ("this is no Python", {}),
    ],
)
def test_services_are_found_by_what_is_imported(tmp_path, source, found):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert find_services(str(script), module=False) == found


def test_modules_beside_the_script_are_read_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from lib import tools\nimport lib.deep.er")
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "tools.py").write_text("import train, pymongo")
    (tmp_path / "lib" / "deep" / "er.py").write_text("import neptune")
    (tmp_path / "unused.py").write_text("import wandb")
    found = find_services("train.py", module=False)
    assert list(found) == ["neptune", "pymongo"]
    assert find_services("train", module=True) == found
    assert find_services("no_such_module", module=True) == {}


def test_an_argument_may_ask_for_an_upload(tmp_path):
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    assert list(find_services(script, False, ["--push_to_hub=True"])) == ["push_to_hub"]


def test_it_is_said_in_one_line_with_what_keeps_it_from_sending():
    assert caution({}) == ""
    assert caution({"boto3": "", "wandb": "WANDB_MODE=offline"}) == (
        "the script may use boto3, wandb: what trials send there is not undone, as files are. "
        "To keep trials from it, set WANDB_MODE=offline for the search."
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import subprocess\nsubprocess.run('ls')", ["subprocess"]),
        ("from subprocess import run", ["subprocess"]),
        ("import os\nos.system('ls')", ["os.system"]),
        ("mp.get_context('spawn')", ["multiprocessing by spawn"]),
        ("DataLoader(data, multiprocessing_context='spawn')", ["multiprocessing by spawn"]),
        ("mp.get_context('fork')\nos.listdir('.')", []),
    ],
)
def test_programs_are_found_by_what_starts_them(tmp_path, source, found):
    (tmp_path / "train.py").write_text(source)
    script = str(tmp_path / "train.py")
    assert find_programs(script, False) == found
    assert len(cautions(script, False, [])) == bool(found)
