from functools import partial

import pytest


@pytest.fixture
def deepspeed_job(tmp_path, monkeypatch):
    """Build ``runner=deepspeed`` for a configuration, in a directory of its own."""
    from deepspeed_cases import build

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return partial(build, tmp_path)
