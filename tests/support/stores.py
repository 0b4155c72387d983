"""Real SQLite stores, each test with one of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.search_runs import LocalStore

from perfsearch.tracking.client import connect
from perfsearch.tracking.location import locate


@pytest.fixture(autouse=True)
def no_ambient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables: making them takes seconds, copying it none."""
    directory = tmp_path_factory.mktemp("template")
    file = directory / "mlflow.db"
    connect(locate(f"sqlite:///{file}"))
    return file


@pytest.fixture
def store(tmp_path: Path, migrated_database: Path) -> LocalStore:
    """A real SQLite store of this test."""
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    return LocalStore(tmp_path)
