from functools import partial

import pytest


@pytest.fixture
def deepspeed_job(tmp_path, monkeypatch):
    """Build ``runner=deepspeed`` for a configuration, in a directory of its own."""
    from support.deepspeed_cases import build

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return partial(build, tmp_path)


@pytest.fixture
def tables(tmp_path):
    """Saved tables of a small DLRM."""
    from support.soap_cases import write_tables

    write_tables(tmp_path / "tables")
    return tmp_path / "tables"


@pytest.fixture
def opened(tmp_path, tables):
    """A runner after ``open``; its trials take what the simulator says."""
    from support.soap_cases import settings

    from perfsearch.pipeline.search import build_runner

    made = []

    def make(**runner):
        built = build_runner(settings(tmp_path, tables, **runner))
        built.open(tmp_path / "run")
        made.append(built)
        return built

    yield make
    for built in made:
        built.close()
