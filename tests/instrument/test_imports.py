"""What a script imports is told by a start, and imported ahead of others where it bears that."""

import json
import os
import subprocess
import sys

import pytest
from support.packages import install

from perfsearch.instrument.imports import Imports

AHEAD = """
import json, sys
from perfsearch.instrument.imports import Imports, import_ahead
done = import_ahead(Imports.from_json(json.loads(sys.argv[1])), {by_torchrun})
print(json.dumps([done.left_out, sorted(done.with_them)]))
"""

PACKAGES = {
    "quiet": "import quiet_too\nVALUE = 1\n",
    "quiet_too": "import logging, threading, os\nos.environ.setdefault('QUIET_TOO', '1')\n",
    "starts_thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "starts_process": "import subprocess\nCHILD = subprocess.Popen(['sleep', '2'])\n",
    "needs_thread": "def late():\n    from starts_thread import threading\nlate()\n",
    "needs_that": "import needs_thread\n",
    "reads_arguments": "import sys\nDEBUG = '--debug' in sys.argv\n",
    "prints": "print('hello')\n",
    "draws": "import random\nVALUE = random.random()\n",
    "catches": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n",
    "changes": "import os\nos.environ['GIVEN'] = 'mine'\n",
    "moves": "import os\nos.chdir('/')\n",
    "logs": "import logging\nlogging.basicConfig()\n",
    "fails": "1 / 0\n",
    "asks_rank": "import os\nRANK = os.environ.get('RANK', '0')\n",
    "uses_own": "import beside\n",
}


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "beside.py").write_text("VALUE = 2\n")
    return {**os.environ, **install(tmp_path / "user", **PACKAGES), "GIVEN": "yours"}


def run(code, environ, *arguments):
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ahead(environ, tmp_path, modules, by_torchrun=False, **more):
    imports = Imports(modules, path=str(tmp_path / "script"), arguments=["train.py", "--debug"])
    told = json.dumps({**imports.to_json(), **more})
    return run(AHEAD.format(by_torchrun=by_torchrun), environ, told)


def test_what_only_defines_things_is_imported(environ, tmp_path):
    assert ahead(environ, tmp_path, ["quiet", "quiet_too", "asks_rank"]) == [{}, []]


def test_what_does_more_is_left_out_and_said(environ, tmp_path):
    left_out, _ = ahead(environ, tmp_path, list(PACKAGES), by_torchrun=True)
    beside = str(tmp_path / "script" / "beside.py")
    assert left_out == {
        "starts_thread": "it starts a thread",
        "starts_process": "it starts a process",
        "reads_arguments": "it reads sys.argv",
        "prints": "it writes to standard output",
        "draws": "it draws or seeds random numbers",
        "catches": "it handles a signal",
        "changes": "it changes variables of the environment",
        "moves": "it changes the working directory",
        "logs": "it sets up logging",
        "fails": "ZeroDivisionError: division by zero",
        "asks_rank": "it reads RANK",
        "uses_own": f"it imports {beside}, which may change",
    }


def test_so_is_what_imports_it(environ, tmp_path):
    modules = ["quiet", "needs_that", "needs_thread", "starts_thread"]
    left_out, with_them = ahead(environ, tmp_path, modules)
    assert set(left_out) == {"starts_thread"}
    assert {*modules} & {*with_them} == {"needs_that", "needs_thread", "starts_thread"}
    assert ahead(environ, tmp_path, ["quiet"]) == [{}, []]


def test_a_setting_of_the_script_is_there_from_its_place_on_and_gone_afterwards(environ, tmp_path):
    install(
        tmp_path / "user",
        early="import os\nassert 'SALT' not in os.environ\n",
        late="import os\nassert os.environ['SALT'] == '1'\n",
    )
    asked = {"settings": [(1, "SALT", "1")]}
    assert ahead(environ, tmp_path, ["early", "late"], **asked) == [{}, []]
    left_out, _ = ahead(environ, tmp_path, ["late", "early"], **asked)
    assert set(left_out) == {"late", "early"}


RECORDED = """
import json, os, sys
from perfsearch.instrument.imports import Recorder
recorder = Recorder()
import quiet_too
os.environ["SALT"] = "1"
sys.path.insert(0, "script")
import beside, quiet
os.environ["SALT"] = "2"
kept = dict(os.environ)
os.environ.clear()
os.environ.update(kept)
modules, settings = recorder.end()
os.environ["LATE"] = "1"
print(json.dumps([[m for m in modules if m in ("quiet", "quiet_too", "beside")], [
    (modules[:place][-1:] == ["quiet_too"], name, value) for place, name, value in settings
]]))
"""


def test_a_start_tells_third_party_modules_and_what_the_script_set(environ, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    modules, settings = run(RECORDED, environ)
    assert modules == ["quiet_too", "quiet"]
    kept = [[at, value] for at, name, value in settings if name == "SALT" and value]
    assert kept == [[True, "1"], [False, "2"], [False, "2"]]
    assert "PATH" not in {name for _, name, _ in settings}, "which has its value again"


def test_a_start_is_unlike_the_first_one_where_it_sets_something_else():
    imports = Imports(["a", "b"], [(0, "X", "1"), (1, "Y", "1"), (2, "PORT", "7")])
    same = [(9, "X", "1"), (9, "Y", "1")]
    assert imports.unlike([*same, (9, "PORT", "8")]) == ""
    assert imports.unlike([(9, "X", "1"), (9, "Y", None)]) == "Y"
    assert imports.unlike(same[1:]) == "X"
    assert imports.unlike([*same, (9, "Z", "1")]) == "Z"
    first = imports.before("Y")
    assert first.modules == ["a"] and first.unlike([(9, "X", "1"), (9, "Y", "2")]) == ""
    assert first.unlike([(9, "X", "2")]) == "X"
    assert imports.before("Z") is None
    assert imports.without(["a"]) == Imports(
        ["b"], [(0, "X", "1"), (0, "Y", "1"), (1, "PORT", "7")]
    )
