import multiprocessing
import os
import time
from pathlib import Path

import pytest

from perfsearch.pipeline.resume import LockError, device_lock, run_directory_lock


def hold(devices: str, log: Path, held: float) -> None:
    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()} note {text}\n")

    with device_lock(devices, note):
        with log.open("a") as file:
            file.write(f"{os.getpid()} in\n")
        time.sleep(held)
        with log.open("a") as file:
            file.write(f"{os.getpid()} out\n")


def test_searches_on_overlapping_devices_take_turns_and_say_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    sets = ["gpu-b,gpu-a", "gpu-b,gpu-c", "gpu-a,gpu-c"]
    workers = [context.Process(target=hold, args=(s, log, 0.2)) for s in sets]
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
