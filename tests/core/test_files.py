from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core import files


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"a": 2}, durable=True)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """The file that was opened before stays whole: the new one takes its name, not its place."""
    path = tmp_path / "new directory" / "file.txt"
    files.write_text(path, "old\n", durable=True)
    with path.open() as before:
        files.write_text(path, "new\n")
        assert before.read() == "old\n"
    assert path.read_text() == "new\n"


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {1: [float("nan"), (float("inf"), 2.5)]})
    assert json.loads(path.read_text()) == {"1": [None, [None, 2.5]]}


def test_no_other_function_writes_a_file_and_moves_it_into_place() -> None:
    found = []
    for path in sorted(Path(files.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
                called = {ast.unparse(function).rpartition(".")[2] for function in calls}
                moves = "rename" in called or "os.replace" in map(ast.unparse, calls)
                writes = called & {"write_text", "write_bytes", "dump", "write"}
                if moves and writes:
                    found.append(f"{path.stem}.{node.name}")
    assert found == ["files.write_text"]


KILLED = """
import os, signal, sys
from perfsearch.core.files import make_temporary_directory
print(make_temporary_directory(), make_temporary_directory(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_directories_of_killed_processes_go_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    mine = files.make_temporary_directory()
    alive = subprocess.Popen(
        [sys.executable, "-c", KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "input()")],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    theirs = alive.stdout.readline().split()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False
    )
    left = killed.stdout.split()
    (tmp_path / "perfsearch-of-a-user").mkdir()
    assert len(left) == 2 and all(os.path.isdir(path) for path in left)
    assert files.remove_left_directories() >= 2
    assert not any(os.path.exists(path) for path in left)
    assert len(theirs) == 2 and all(os.path.isdir(path) for path in [*theirs, mine])
    assert (tmp_path / "perfsearch-of-a-user").exists()
    alive.communicate("\n")
    files.remove_left_directories()
    files.remove_temporary_directory(mine)
    assert [path.name for path in tmp_path.iterdir()] == ["perfsearch-of-a-user"]


WITHOUT_DESCRIPTORS = """
import os, resource
from contextlib import suppress
from perfsearch.core.files import make_temporary_directory, remove_temporary_directory

directory = make_temporary_directory()
(directory / "a").mkdir()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
remove_temporary_directory(directory)
assert directory.exists()
with suppress(OSError):
    make_temporary_directory()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(os.listdir(directory.parent) == [directory.name])
"""


def test_a_directory_that_cannot_be_removed_is_when_the_process_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True"
    assert list(tmp_path.iterdir()) == []


def test_others_of_the_machine_can_read_neither_files_nor_directories(tmp_path: Path) -> None:
    place = tmp_path / "run"
    files.make_private(place)
    files.make_private(place)
    files.write_text(place / "a", "x", durable=True)
    with open(place / "b", "a", opener=files.private) as log:
        log.write("y")
    assert place.stat().st_mode & 0o777 == 0o700
    assert [p.stat().st_mode & 0o777 for p in sorted(place.iterdir())] == [0o600, 0o600]


def test_bytes_of_a_path_that_are_no_text_are_written_as_they_are(tmp_path: Path) -> None:
    files.write_text(tmp_path / "run.sh", "cd " + os.fsdecode(b"caf\xe9\n"))
    assert (tmp_path / "run.sh").read_bytes() == b"cd caf\xe9\n"


READS = """
import resource, sys
from pathlib import Path
from perfsearch.core.files import read_at_most

resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
print(len(read_at_most(Path(sys.argv[1]), 2**30)))
"""


def test_a_small_file_that_may_be_large_takes_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_bytes(b"x" * (2**20 + 1))
    words = [sys.executable, "-c", READS, file]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == f"{2**20 + 1}\n", done.stderr
    assert len(files.read_at_most(file, 2**20 + 1)) == 2**20 + 1
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        files.read_at_most(file, 2**20)
