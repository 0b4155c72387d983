"""Keeps tests that run at the same time out of each other's way."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_OWN_DIRECTORY = "PERFSEARCH_TESTS_TMPDIR"


def pytest_configure(config):
    """Give each of several parallel workers a ``TMPDIR``, where searches lock the devices."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and _OWN_DIRECTORY not in os.environ:
        os.environ[_OWN_DIRECTORY] = tempfile.mkdtemp(prefix=f"pst-{worker}-")
        os.environ["TMPDIR"] = tempfile.tempdir = os.environ[_OWN_DIRECTORY]


def pytest_unconfigure(config):
    """Remove it."""
    own = os.environ.pop(_OWN_DIRECTORY, None)
    if own is not None and os.environ.get("PYTEST_XDIST_WORKER") is not None:
        shutil.rmtree(own, ignore_errors=True)


@pytest.fixture
def short_tmp():
    """An empty directory for a ``TMPDIR`` of its own; pytest's are too long for sockets in them."""
    directory = Path(tempfile.mkdtemp(prefix="pst-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Run the command in this process with the fakes; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    from support import front_fakes

    from perfsearch.cli import search as cli

    front_fakes.install(monkeypatch.setattr)
    front_fakes.calls.clear()

    def run(*arguments, prefix=True):
        code = cli.main([*(front_fakes.PREFIX if prefix else []), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
