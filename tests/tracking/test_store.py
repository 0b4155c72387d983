from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_server import fake_server
from support.search_runs import trial

from perfsearch.core.journal import Event
from perfsearch.core.trial import Status
from perfsearch.tracking.client import _keep_from_proxies, connect
from perfsearch.tracking.location import (
    TrackingError,
    how_to_open,
    locate,
    why_unreachable,
    without_credentials,
)
from perfsearch.tracking.store import HOST, PID, START, is_dead, liveness_tags, shown


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
    view = "runs?workflowType=machine_learning&viewStateShareKey=perfsearch"
    assert how_to_open(server, "7") == f"https://***@host:5000/#/experiments/7/{view}"
    first, second = how_to_open(locate(None, spaced), "3").splitlines()
    assert shlex.split(first) == command
    assert second == f"http://127.0.0.1:5000/#/experiments/3/{view}"
    assert without_credentials("http://host/path") == "http://host/path"


@pytest.fixture
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("works", ""),
        ("wants a password", ""),  # which is for MLflow to tell
        ("forbids", ""),
        ("sends elsewhere", ""),
        ("is down", "answers 503 Service Unavailable"),
        ("hangs", "has not answered within 0.5 s"),
    ],
)
def test_why_a_server_cannot_be_used_is_known_at_once(no_proxy, mode, says):
    """mlflow/mlflow#11551, #545"""
    with fake_server(mode) as uri:
        patience = 0.5 if mode == "hangs" else 30.0
        assert why_unreachable(uri, patience) == (f"{uri} {says}" if says else "")


def test_a_port_that_nothing_listens_on_is_seen_at_once(no_proxy):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        why = why_unreachable(uri, 30.0)
        assert why.startswith("nothing answers at http://***@127.0.0.1:") and "refused" in why


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_a_proxy_is_named_and_a_server_of_this_host_is_asked_without(no_proxy, monkeypatch, name):
    monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    why = why_unreachable("http://example.invalid", 30.0)
    assert "http://example.invalid" in why and "through the proxy http://***@127.0.0.1:9" in why
    with fake_server("works") as uri:
        assert why_unreachable(uri, 30.0) == ""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with fake_server("forbids") as uri, pytest.raises(Exception, match="403"):
        connect(locate(uri))  # its own answer, and not that its proxy cannot be reached
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "127.0.0.1"
    with fake_server("is down") as proxy:
        monkeypatch.setenv(name, proxy)
        why = why_unreachable("http://example.invalid/mlflow", 30.0)
        assert why == (
            "http://example.invalid/mlflow answers 503 Service Unavailable through the proxy "
            f"{proxy}"
        )


def test_without_a_proxy_no_environment_is_changed(no_proxy):
    _keep_from_proxies(locate("http://localhost:5000"))
    assert "no_proxy" not in os.environ


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "a?b", "a#b", "it's 100%?#"])
def test_the_store_is_in_the_directory_whatever_its_name(
    tmp_path, migrated_database, monkeypatch, name
):
    """cachix/devenv#2492, treeverse/dvc#2885"""
    here = tmp_path / name
    here.mkdir()
    shutil.copy(migrated_database, here / "mlflow.db")
    location = locate(None, here)
    assert locate(location.uri, tmp_path) == location
    assert (location.database, location.query) == (here / "mlflow.db", "")
    client = connect(location)
    run_id = client.create(client.experiment("exp", location), "run", 1, {})
    (tmp_path / "note.txt").write_text("hello")
    client.upload(run_id, tmp_path / "note.txt", None)
    (uploaded,) = here.rglob("note.txt")
    assert uploaded.read_text() == "hello"
    assert {path.name for path in tmp_path.iterdir()} == {name, "note.txt"}
    command = shlex.split(how_to_open(location))
    assert command[:3] == ["cd", str(here), "&&"] and command[-1] == "sqlite:///mlflow.db"
    monkeypatch.chdir(here)
    assert connect(locate(command[-1])).run(run_id) is not None


NO_HOME = """
import os, pwd, sys
from pathlib import Path
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
os.environ.pop("HOME", None)
from perfsearch.tracking.client import connect
from perfsearch.tracking.location import locate
location = locate(None, Path(sys.argv[1]))
client = connect(location)
print(client.create(client.experiment("exp", location), "run", 1, {}), "HOME" in os.environ)
"""


def test_a_user_without_a_home_has_a_store(tmp_path, migrated_database):
    """pytorch/pytorch#140765"""
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    done = subprocess.run(
        [sys.executable, "-c", NO_HOME, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "False"


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


ENDED = """
import sys, threading, time
from pathlib import Path
from perfsearch.tracking.client import _make
making = threading.Thread(target=_make, args=(Path("mlflow.db").absolute(),), daemon=True)
making.start()
while not list(Path().glob(".mlflow.db.*")):
    time.sleep(0.01)
sys.exit(0)
"""


def test_a_process_that_ends_while_it_makes_a_database_leaves_nothing_of_it(tmp_path):
    subprocess.run([sys.executable, "-c", ENDED], cwd=tmp_path, check=True, timeout=100)
    assert list(tmp_path.iterdir()) == []
