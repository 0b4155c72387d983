"""Our own processes, in a directory whose files have the names of standard modules."""

import gc
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.python import large_imports, module_command

PACKAGE = Path(__file__).parents[2] / "perfsearch"
SHADOWS = ("random", "json", "types", "torch", "yaml", "hydra", "psutil")


@pytest.fixture
def shadowed(tmp_path):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of this directory')")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        module_command("perfsearch.online.proposer"),
        module_command("perfsearch.workers.join", "--help"),
        module_command("perfsearch", "--version"),
    ],
)
def test_nothing_of_the_current_directory_is_imported(shadowed, words):
    """pytorch/pytorch#19943"""
    done = subprocess.run(
        words, cwd=shadowed, capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_python_dash_m_is_the_command(tmp_path):
    """python-gitlab/python-gitlab#713"""
    (tmp_path / "hydra.py").write_text("raise ImportError('hydra.py of this directory')")

    def ended(*words):
        return subprocess.run(
            [sys.executable, "-m", "perfsearch", *words], cwd=tmp_path, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip

    assert ended("--version").stdout.startswith("perfsearch ")
    refused = ended("stratgy=grid")
    assert (refused.returncode, "strategy" in refused.stderr) == (2, True), refused.stderr


def test_python_is_started_for_our_modules_in_one_place():
    """A start without its options would import from the user's directory."""
    starts = re.compile(r"sys\.executable,[^\]]*\"-m\"")
    found = {
        str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")
        if starts.search(file.read_text())
    }  # fmt: skip
    # the last is a command that is shown
    assert found == {"core/python.py", "cli/run.py", "tracking/location.py"}


_COLLECTED_AS_BEFORE = """
import gc
from perfsearch.core.python import large_imports

before = gc.isenabled(), gc.get_freeze_count()
with large_imports():
    assert not gc.isenabled()
    with large_imports():
        pass
    assert not gc.isenabled()
    made = [[] for _ in range(100_000)]
assert (gc.isenabled(), gc.get_freeze_count()) == before
oldest = {id(one) for one in gc.get_objects(generation=2)}
assert {id(one) for one in made} <= oldest, "each young one would be looked at again"
"""


def test_garbage_is_collected_as_before_once_large_libraries_are_imported():
    """In a process of its own: what others have frozen stays so."""
    ended = subprocess.run(
        [sys.executable, "-c", _COLLECTED_AS_BEFORE], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_an_import_that_fails_leaves_the_collector_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ModuleNotFoundError), large_imports():
            importlib.import_module("no_such_library")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


STRICT = """
import warnings
from perfsearch.core.python import large_imports, let_warnings_be_warnings

with large_imports():
    warnings.warn("of a library", DeprecationWarning)
try:
    warnings.warn("of the user's code", DeprecationWarning)
except DeprecationWarning:
    print("raised")
let_warnings_be_warnings()
warnings.warn("of a library", DeprecationWarning)
warnings.warn("shown")
"""


def test_warnings_that_are_to_be_raised_end_none_of_our_own_processes():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STRICT], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr
    assert "UserWarning: shown" in done.stderr and "of a library" not in done.stderr
