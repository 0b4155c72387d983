from __future__ import annotations

import shlex
import socket

import pytest

from perfsearch.tracking.uri import (
    TrackingError,
    how_to_open,
    is_reachable,
    locate,
    without_credentials,
)


def test_the_default_is_absolute_with_artifacts_beside_it(tmp_path):
    found = locate(None, tmp_path)
    assert found.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert found.artifact_location == f"file://{tmp_path}/mlruns"


def test_the_environment_comes_before_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert locate(None, tmp_path).uri == "http://127.0.0.1:5000"
    assert locate("sqlite:///other.db", tmp_path).uri == f"sqlite:///{tmp_path}/other.db"


def test_a_relative_database_does_not_follow_a_change_of_directory(tmp_path, monkeypatch):
    found = locate("sqlite:///sub/mlflow.db", tmp_path)
    assert found.uri == f"sqlite:///{tmp_path}/sub/mlflow.db"
    assert found.artifact_location == f"file://{tmp_path}/sub/mlruns"


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "/data/mlruns", "file:///data/mlruns"])
def test_a_plain_directory_is_refused_with_what_to_use(uri, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(TrackingError, match="sqlite:///") as error:
        locate(uri, tmp_path)
    assert f"tracking.uri={uri}" in str(error.value)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert locate(uri, tmp_path).uri.startswith("file:///")


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(uri, tmp_path):
    with pytest.raises(TrackingError, match="not a database file"):
        locate(uri, tmp_path)


def test_opening_names_the_store_and_hides_passwords(tmp_path):
    spaced = tmp_path / "a b"
    spaced.mkdir()
    command = shlex.split(how_to_open(locate(None, spaced)))
    assert command[-3:] == ["ui", "--backend-store-uri", f"sqlite:///{spaced}/mlflow.db"]
    server = locate("https://me:hunter2@host:5000/")
    assert how_to_open(server, "7") == "https://***@host:5000/#/experiments/7"
    assert without_credentials("http://host/path") == "http://host/path"


def test_a_port_that_nothing_listens_on_is_seen_at_once(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not is_reachable(uri)
        server.listen()
        assert is_reachable(uri)


def test_behind_a_proxy_the_port_tells_nothing(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert is_reachable("http://example.invalid")


def test_a_kind_of_store_that_mlflow_lacks_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(TrackingError, match="foo://bar: MLflow has no such kind of store"):
        locate("foo://bar", tmp_path)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("directory", "directory is a directory"),
        ("file/x.db", "file is no directory"),
        ("file/sub/x.db", "file is no directory"),
        ("/proc/x.db", "/proc cannot be written"),
        ("/proc/sub/x.db", "/proc cannot be written"),
    ],
)
def test_a_database_that_cannot_be_opened_is_refused_before_anything_starts(
    tmp_path, place, reason
):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    uri = f"sqlite:///{tmp_path / place}"
    with pytest.raises(TrackingError, match=f"tracking.uri={uri}: .*{reason}.* tracking.enabled"):
        locate(uri, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "file"]
