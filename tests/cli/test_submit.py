"""What is submitted to Slurm; tests of the launchers submit a real search."""

import sys

import pytest

from perfsearch.cli import submit
from perfsearch.cli.submit import parameters, submitted
from perfsearch.config.schema import validate
from perfsearch.core.command import Command, carried_out
from perfsearch.core.errors import BadInputError

JOB = {"runner": {"name": "ddp"}, "strategy": {"name": "grid"}, "workload": {"name": "mlp"}}


def settings(**launcher):
    return validate({**JOB, "launcher": {"name": "slurm", **launcher}})


def test_only_a_search_that_asks_for_it_is_submitted(monkeypatch, tmp_path):
    assert submitted(validate(JOB)) is None
    assert submitted(settings()) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInputError, match=r"launcher\.submit=true: there is no sbatch here"):
        submitted(settings(submit=True))
    with (
        carried_out(Command("perfsearch.search")),
        pytest.raises(BadInputError, match="from Python a search runs where it is called"),
    ):
        submitted(settings(submit=True))


def test_the_job_gives_the_same_command_without_asking_again():
    given = ["launcher=slurm", "launcher.submit=true", 'launcher.sbatch=["--time=1"]', "seed=3"]
    python = [sys.executable, "-P", "-m"]
    with carried_out(Command("perfsearch", given, ranks_given=["nproc=2"])):
        words = submit._words()
    kept = ["nproc=2", *given[:1], *given[2:], "launcher.submit=false"]
    assert words == [*python, "perfsearch", *kept]
    options = ["--search", *(word for key in given for word in ("-o", key))]
    with carried_out(Command("perfsearch-run", options, ["train.py", "--lr", "a b"])):
        words = submit._words()
    assert words[:4] == [*python, "perfsearch.cli.run"]
    assert words[-5:] == ["-o", "launcher.submit=false", "train.py", "--lr", "a b"]
    assert "launcher.submit=true" not in words and given[2] in words


def test_options_of_the_job_are_those_of_sbatch():
    assert parameters(["--gpus-per-node=8", "--exclusive"]) == {
        "gpus-per-node": "8",
        "exclusive": True,
    }
    with pytest.raises(BadInputError, match=r"launcher\.sbatch=-N2: allowed are long options"):
        parameters(["-N2"])
