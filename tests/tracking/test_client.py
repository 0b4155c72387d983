from __future__ import annotations

from pathlib import Path

import pytest

from perfsearch.tracking.client import connect
from perfsearch.tracking.uri import locate


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
