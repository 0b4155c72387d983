"""A script that is run by perfsearch, or by a hand-over, sees what it sees under Python alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.instrument.main import run_script
from perfsearch.instrument.orders import Orders
from perfsearch.runners._script_start import program

TEXT = """import json, os, sys
os.chdir("/")
names = ("__name__", "__file__", "__package__", "__spec__", "__cached__", "__doc__")
seen = {name: globals()[name] for name in names}
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
        run_script(Orders(script), [out[1]])
    else:
        command = [sys.executable, "start.py", script, out[1]]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    python, ours = (json.loads(Path(name).read_text()) for name in out)
    assert ours["argv"][0] == python["argv"][0] == script
    assert {k: v for k, v in ours.items() if k != "argv"} == {
        k: v for k, v in python.items() if k != "argv"
    }
