"""A script that is run by perfsearch, or by a hand-over, sees what it sees under Python alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.python import module_command
from perfsearch.instrument.entry import run_script
from perfsearch.instrument.launch import ENTRY, LaunchConfig
from perfsearch.runners._script.export import program

TEXT = """import json, os, sys
os.chdir("/")
names = ("__name__", "__file__", "__package__", "__spec__", "__cached__", "__doc__")
seen = {name: globals()[name] for name in names}
seen.update(builtins=type(__builtins__).__name__, loader=type(__loader__).__name__)
seen.update(argv=sys.argv, path=sys.path[0], main=sys.modules["__main__"].__file__)
seen.update(code=(lambda: 0).__code__.co_filename)
json.dump(seen, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("script", ["train.py", "links/train.py", "links/../train.py"])
@pytest.mark.parametrize("way", ["rank", "hand-over"])
def test_paths_are_those_of_python_itself(tmp_path, monkeypatch, script, way):
    (tmp_path / "train.py").write_text(TEXT)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "train.py").symlink_to("../train.py")
    (tmp_path / "start.py").write_text(program({}, [], module=False))
    out = [str(tmp_path / name) for name in ("python.json", "ours.json")]
    subprocess.run([sys.executable, script, out[0]], cwd=tmp_path, check=True, timeout=60)
    if way == "rank":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        run_script(LaunchConfig(script), [out[1]])
    else:
        command = [sys.executable, "start.py", script, out[1]]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    python, ours = (json.loads(Path(name).read_text()) for name in out)
    assert ours["argv"][0] == python["argv"][0] == script
    assert {k: v for k, v in ours.items() if k != "argv"} == {
        k: v for k, v in python.items() if k != "argv"
    }


BEFORE_TORCH = """import os, sys
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # read once, at the import
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
import torch.distributed as dist
print(dist.get_debug_level().name)
"""


@pytest.mark.parametrize("more", [{}, {"autotune": {}}, {"knobs": {"dataloader_workers": 1}}])
def test_what_a_script_sets_for_torch_before_it_imports_it_is_heeded(tmp_path, more):
    (tmp_path / "train.py").write_text(BEFORE_TORCH)
    environment = {**os.environ, **LaunchConfig("train.py", **more).to_environment()}
    done = subprocess.run(
        [*module_command(ENTRY), "train.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "DETAIL\n"), done.stderr
    assert "perfsearch" in done.stderr  # what it could do is said


STEPS = """import gc, sys
import torch
collections = []
gc.callbacks.append(lambda phase, information: collections.append(phase))
assert "torch._dynamo" not in sys.modules
weight = torch.nn.Parameter(torch.ones(2))
torch.optim.SGD([weight], lr=0.1)
assert "torch._dynamo" in sys.modules and gc.isenabled()
print(len(collections) < 10)
"""


def test_no_garbage_is_looked_for_while_an_optimizer_imports_the_compiler(tmp_path):
    """Which it does whether or not anything is compiled: torch alone looks 300 times meanwhile."""
    (tmp_path / "train.py").write_text(STEPS)
    environment = {**os.environ, **LaunchConfig("train.py").to_environment()}
    done = subprocess.run(
        [*module_command(ENTRY), "train.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_hand_over_leaves_the_import_of_torch_to_the_script_too(tmp_path):
    (tmp_path / "train.py").write_text(
        "import importlib.util\nassert importlib.util.find_spec('torch')\n"
        + BEFORE_TORCH
        + "from torch.utils.data import DataLoader\nprint(DataLoader([1]).num_workers)\n"
    )
    (tmp_path / "start.py").write_text(program({"dataloader_workers": 1}, [], module=False))
    done = subprocess.run(
        [sys.executable, "start.py", "train.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "DETAIL\n1\n"), done.stderr


def test_a_script_without_torch_is_told_of_it(tmp_path):
    (tmp_path / "count.py").write_text("import sys\nprint(sum(range(3)))\nsys.exit(4)\n")
    environment = {**os.environ, **LaunchConfig("count.py").to_environment()}
    done = subprocess.run(
        [*module_command(ENTRY), "count.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "3\n")
    assert "perfsearch: " in done.stderr


SHADOW = "raise ImportError('random.py of the current directory')"
TELL = "import json, random, sys\njson.dump([sys.path, random.__file__], open(sys.argv[1], 'w'))\n"


@pytest.mark.parametrize(("module", "safe"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("ranks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_path_is_the_one_without_us(tmp_path, ranks, module, safe):
    """pytorch/pytorch#19943, meta-pytorch/torchtune#1540: ``random.py`` beside the user."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tell.py").write_text(TELL)
    if not module:
        (tmp_path / "random.py").write_text(SHADOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONSAFEPATH": "1"} if safe else {}
    torchrun = str(Path(sys.executable).parent / "torchrun")
    one = ["--standalone", "--nproc-per-node=1"] if ranks else []
    script = ["-m", "src.tell"] if module else ["src/tell.py"]
    ways = {
        "alone.json": [torchrun, *one] if ranks else [sys.executable],
        "ours.json": [str(Path(sys.executable).parent / "perfsearch-run"), *one],
    }
    for name, words in ways.items():
        done = subprocess.run(
            [*words, *script, str(tmp_path / name)], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "alone.json").read_text() == (tmp_path / "ours.json").read_text()
