"""Keeps tests that run at the same time out of each other's way."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

_OWN_DIRECTORY = "PERFSEARCH_TESTS_TMPDIR"
_LOCKS = "PERFSEARCH_LOCK_DIRECTORY"


def pytest_configure(config):
    """Give each worker a directory where searches lock the devices, and several a ``TMPDIR``.

    What is compiled is compiled as fast as can be.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if _OWN_DIRECTORY in os.environ and os.environ.get("PERFSEARCH_TESTS_WORKER") == str(worker):
        return  # pytest that a test has started
    # Kernels without vectors: compilers take many seconds for ATen's headers of them, once for each
    # set of instructions just to see whether it can be used.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    own = tempfile.mkdtemp(prefix=f"pst-{worker or 'main'}-", dir="/tmp")
    os.environ.update({_OWN_DIRECTORY: own, "PERFSEARCH_TESTS_WORKER": str(worker)})
    os.environ[_LOCKS] = f"{own}/locks"
    config.perfsearch_own = own
    if worker is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = own


def pytest_unconfigure(config):
    """Remove it."""
    shutil.rmtree(getattr(config, "perfsearch_own", ""), ignore_errors=True)


@pytest.fixture(autouse=True)
def levels_of_logging():
    """Take back what a command run in this process sets for all of it (``hydra.verbose=true``)."""
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


@pytest.fixture(autouse=True)
def environment():
    """Take back what a test leaves in the environment, as ``mlflow.set_tracking_uri`` does."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"})


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
