import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfsearch.pipeline import resume
from perfsearch.pipeline.resume import LockError, device_lock, run_directory_lock


def hold(devices: str, log: Path, held: float, locks: Path | None = None) -> None:
    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()} note {text}\n")

    with device_lock(devices, note, locks):
        with log.open("a") as file:
            file.write(f"{os.getpid()} in\n")
        time.sleep(held)
        with log.open("a") as file:
            file.write(f"{os.getpid()} out\n")


def test_searches_on_overlapping_devices_take_turns_and_say_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    sets = ["gpu-b,gpu-a", "gpu-b,gpu-c", "gpu-a,gpu-c"]
    workers = [context.Process(target=hold, args=(s, log, 0.2, tmp_path / "locks")) for s in sets]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    lines = log.read_text().splitlines()
    turns = [line.split() for line in lines if "note" not in line]
    for (first, enter), (second, leave) in zip(turns[::2], turns[1::2], strict=True):
        assert (enter, leave) == ("in", "out")
        assert first == second
    assert any("waiting for gpu-" in line and "is using it" in line for line in lines)


def test_no_devices_need_no_lock() -> None:
    with device_lock("", lambda text: None):
        pass


def test_a_directory_in_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    refusal = (
        f"process {os.getpid()} is running this search, or uploading it to MLflow. Wait for it"
    )
    again = run_directory_lock(tmp_path)
    with run_directory_lock(tmp_path), pytest.raises(LockError, match=refusal), again:
        pass


def test_a_device_has_one_lock_whatever_the_temporary_directory(tmp_path, monkeypatch):
    places = []
    monkeypatch.delenv(resume.LOCKS_VARIABLE, raising=False)
    monkeypatch.setattr(resume, "LOCKS", tmp_path / "of-all")
    monkeypatch.setattr("perfsearch.pipeline.resume.lock", lambda *a, **more: True)
    for temporary in ("a", "b"):
        (tmp_path / temporary).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / temporary))
        monkeypatch.setattr("tempfile.tempdir", None)
        with device_lock("cpu", print):
            places += list(tmp_path.rglob("*.lock"))
    assert len(places) == 2 and len(set(places)) == 1
    assert places[0].parent.stat().st_mode & 0o7777 == 0o1777
    assert places[0].stat().st_mode & 0o777 == 0o666


def test_where_the_locks_are_is_said_by_key_and_by_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(resume.LOCKS_VARIABLE, str(tmp_path / "variable"))
    with device_lock("cpu", print):
        assert list((tmp_path / "variable").iterdir())
    with device_lock("cpu", print, tmp_path / "key"):
        assert list((tmp_path / "key").iterdir())


HOLDS = """
import sys
from pathlib import Path
from perfsearch.core.errors import BadInputError
from perfsearch.pipeline.resume import device_lock, run_directory_lock
from perfsearch.tracking.client import _initialising
from perfsearch.tracking.location import StoreLocation
here = Path(sys.argv[1])
with run_directory_lock(here, lambda text: print("warned:", text)), \\
     _initialising(StoreLocation(f"sqlite:///{here}/mlflow.db", None)):
    print("held")
try:
    with device_lock("cpu", print, here):
        pass
except BadInputError as error:
    print("refused:", error)
"""


@functools.cache
def compiler():
    return shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux")
@pytest.mark.parametrize("number", ["37", "38"])
def test_a_file_system_without_locks(tmp_path, number):
    """tox-dev/filelock#67, spack/spack#12501"""
    if compiler() is None:
        pytest.skip("no C compiler, to stand in for such a file system")
    source, shim = Path(__file__).parents[1] / "data" / "noflock.c", tmp_path / "noflock.so"
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    (tmp_path / "here").mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(shim), "NOFLOCK_UNDER": str(tmp_path / "here")}
    done = subprocess.run(
        [sys.executable, "-c", HOLDS, tmp_path / "here"], capture_output=True, text=True,
        env={**environment, "NOFLOCK_ERRNO": number}, check=False,
    )  # fmt: skip
    warned, held, refused = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert warned.startswith("warned:") and "has no locks" in warned and "run_dir" in warned
    assert held == "held"
    assert str(tmp_path / "here") in refused and "set limits.lock_directory" in refused
