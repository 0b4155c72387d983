"""Where rows and remarks of tuning go, on the deciding rank."""

import errno
from types import SimpleNamespace

import pytest
import torch

from perfsearch.core.errors import BadInputError
from perfsearch.online import rank
from perfsearch.online.options import AutotuneOptions

WRAPPED = SimpleNamespace(module=torch.nn.Linear(1, 1))


def recorder(path=None, serial=0):
    return rank._Recorder(AutotuneOptions(log_file=path), "a job", WRAPPED, serial)


def test_a_log_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"autotune.log_file=.*cannot be written"):
        recorder(tmp_path / "file" / "log.csv")
    recorder(tmp_path / "new" / "log.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_training_goes_on_where_the_log_ends(tmp_path, monkeypatch, capsys):
    found = recorder(tmp_path / "log.csv")
    found.open(["bucket_cap_mb"])

    def full(entry):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(found._writer, "write", full)
    found.write(None)
    found.write(None)
    told = capsys.readouterr().err
    assert told.count("log.csv is no longer written: No space left on device") == 1


def test_lines_of_several_models_say_of_which(monkeypatch, capsys):
    monkeypatch.setattr(rank, "_sessions", [None])
    recorder().say("alone")
    monkeypatch.setattr(rank, "_sessions", [None, None])
    recorder().say("first")
    recorder(serial=1).say("second")
    assert capsys.readouterr().err.splitlines() == [
        "perfsearch autotune: alone",
        "perfsearch autotune, model 0 (Linear): first",
        "perfsearch autotune, model 1 (Linear): second",
    ]
