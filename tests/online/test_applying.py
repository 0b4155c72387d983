"""Where the knobs of a found configuration are read from."""

import pytest
import yaml

from perfsearch.online.applying import read_knobs
from perfsearch.search.errors import BadInputError

KNOBS = {"bucket_cap_mb": 8.0, "optimizer_implementation": "fused", "compile_mode": "none"}


def write(directory, runner="ddp", knobs=None):
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"runner": {"name": runner, "knobs": KNOBS if knobs is None else knobs}}
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_file_its_directory_and_the_runs_directory_are_the_same(tmp_path):
    write(tmp_path / "run", knobs={"bucket_cap_mb": "search"})
    write(tmp_path / "run" / "best")
    best = tmp_path / "run" / "best"
    for source in (best / "config.yaml", best, tmp_path / "run", str(best)):
        assert read_knobs(source) == KNOBS
    assert read_knobs(KNOBS) == KNOBS


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"bucket_cap": 1}, "bucket_cap_mb"),
        ({"bucket_cap_mb": [1, 2]}, "give one value"),
        ({"bucket_cap_mb": "search"}, "give one value"),
    ],
)
def test_knobs_that_are_none_are_refused(source, message):
    with pytest.raises(BadInputError, match=message):
        read_knobs(source)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(BadInputError, match="no such file"):
        read_knobs(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(BadInputError, match="not what a search hands over"):
        read_knobs(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(BadInputError, match="not what a search hands over"):
        read_knobs(tmp_path)
    write(tmp_path, runner="zero")
    with pytest.raises(BadInputError, match="runner=zero"):
        read_knobs(tmp_path)
