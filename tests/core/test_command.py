"""Hints in the words of the command that was given."""

import pytest

from perfsearch.cli.run import command_line, split
from perfsearch.core.command import Command, carried_out, given


def test_hints_are_keys_unless_another_command_was_given():
    assert given().key("resume=never") == "resume=never"
    assert given().ranks(2) == "nproc=2" and given().without_ranks == "nproc=auto"
    with carried_out(Command("perfsearch-run", ["--search"], ["train.py", "a b"])):
        assert given().key("runner.knobs.x=[1,2]") == "-o 'runner.knobs.x=[1,2]'"
        assert given().ranks("N") == "--nproc-per-node N"
        assert given().without_ranks == "perfsearch-run --search train.py 'a b'"
    assert given() == Command()


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (
            Command("perfsearch", ["runner=zero", "budget.trials=5"], ranks_given=["nproc=2"]),
            "perfsearch nproc=2 runner=zero resume=extend budget.trials=10",
        ),
        (
            Command("perfsearch-run", ["--search", "-o", "budget.trials=5"], ["a.py", "--lr", "1"]),
            "perfsearch-run --search -o resume=extend -o budget.trials=10 a.py --lr 1",
        ),
        (
            Command("perfsearch.search"),
            "perfsearch.search(..., 'resume=extend', 'budget.trials=10')",
        ),
    ],
)
def test_a_command_is_given_again_with_other_keys(command, again):
    assert command.again("resume=extend", "budget.trials=10") == again


@pytest.mark.parametrize(
    "ranks", [["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--nproc-per=2"], []]
)
def test_only_the_number_of_ranks_is_left_out_of_the_command(tmp_path, ranks):
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["--search", "-o", "seed=1", *ranks, "--standalone", str(script), "--nproc-per-node=3"]
    told = command_line(split(words)).without_ranks
    assert told == (f"perfsearch-run --search -o seed=1 --standalone {script} --nproc-per-node=3")
