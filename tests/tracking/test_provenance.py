from __future__ import annotations

import json
import subprocess
import sys

from perfsearch.core.version import version
from perfsearch.tracking.provenance import commit, provenance


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", directory, *arguments], check=True, capture_output=True)


def test_commit_and_whether_files_differ(tmp_path):
    assert commit(tmp_path) == {}
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "train.py").write_text("2")
    assert commit(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_what_it_tells_is_plain_and_has_no_environment(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("MY_TOKEN", "do-not-tell")
    found = provenance(tmp_path)
    assert found["perfsearch"] == version()
    assert found["versions"]["torch"]
    assert found["devices"] == []
    assert "driver" not in found
    assert "code" not in found
    assert "do-not-tell" not in json.dumps(found)
