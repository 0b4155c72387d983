from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.search_runs import trial

from perfsearch.core.journal import Event
from perfsearch.core.trial import Status
from perfsearch.tracking.store import (
    HOST,
    PID,
    START,
    TrackingError,
    connect,
    how_to_open,
    is_dead,
    is_reachable,
    liveness_tags,
    locate,
    shown,
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


def test_a_process_killed_while_it_makes_the_store_leaves_one_that_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow itself fails for ever on tables that are half made."""
    from mlflow.store.db import utils

    class KilledError(BaseException):
        pass

    def killed(engine: object) -> None:
        utils.InitialBase.metadata.create_all(engine)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(utils, "_initialize_tables", killed)
        with pytest.raises(KilledError):
            connect(locate(None, tmp_path))
    assert not (tmp_path / "mlflow.db").exists()

    client = connect(locate(None, tmp_path))
    assert client.experiment("perfsearch", locate(None, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_store_that_is_there_is_opened_and_not_made_again(
    tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.db import utils

    (tmp_path / "mlflow.db").write_bytes(migrated_database.read_bytes())
    monkeypatch.setattr(utils, "_initialize_tables", lambda engine: pytest.fail("made again"))
    connect(locate(None, tmp_path)).ping()


def test_a_living_process_is_not_dead_and_a_reused_id_is():
    """optuna/optuna#4234: liveness goes by process id and start time, never by a clock."""
    tags = liveness_tags()
    assert not is_dead(tags)
    assert is_dead({**tags, START: str(float(tags[START]) - 1000)})


def test_a_process_that_ended_is_dead_and_one_elsewhere_is_not():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    tags = {**liveness_tags(), PID: str(process.pid)}
    assert is_dead(tags)
    assert not is_dead({**tags, HOST: "another-host"})
    assert not is_dead({})


def events(*named: tuple[str, dict[str, object]]) -> list[Event]:
    return [Event(number, name, data) for number, (name, data) in enumerate(named, start=1)]


def test_of_a_trial_that_was_run_again_the_last_end_is_shown_and_of_ends_the_last() -> None:
    first, again = trial(0, Status.CRASH).to_json(), trial(0).to_json()
    journal = events(
        ("opened", {"unix_s": 1.0}),
        ("asked", {}),
        ("finished", {"unix_s": 2.0, "trial": first}),
        ("ended", {"exit_code": 1}),
        ("opened", {"unix_s": 3.0}),
        ("finished", {"unix_s": 4.0, "trial": again}),
        ("ended", {"exit_code": 0}),
    )
    assert [event.number for event in shown(journal)] == [1, 5, 6, 7]


def test_a_trial_without_a_time_always_gets_the_same_one() -> None:
    journal = events(
        ("opened", {"unix_s": 10.0}),
        ("finished", {"trial": trial(0).to_json()}),
        ("finished", {"trial": trial(1).to_json()}),
    )
    assert [event.data["unix_s"] for event in shown(journal)] == [10.0, 12.0, 14.0]
