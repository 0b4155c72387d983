"""The words of ``perfsearch compare``, before anything is started."""

import json

import pytest

from perfsearch.cli import compare, search


@pytest.fixture
def asked(monkeypatch):
    """Runs the command up to where arms are looked at; what it was asked then."""
    seen = []
    monkeypatch.setattr(compare, "_compare", lambda asked: seen.append(asked) or 4)

    def run(*words):
        seen.clear()
        return search.main(["compare", *words]), *seen

    return run


def test_arms_and_options(asked):
    code, given = asked("a.py", "b.py --x 1", "--min-gain", "0.02", "--budget-seconds=60")
    assert code == 4
    assert given.arms == ["a.py", "b.py --x 1"]
    assert (given.min_gain, given.budget_seconds, given.seed) == (0.02, 60.0, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.py"], "a.py: two or more are needed"),
        (["a.py", "b.py", "--max-starts", "1"], "--max-starts: '1': allowed: a whole number >= 2"),
        (["a.py", "b.py", "--min-gain", "3"], "a number from 0 to 1, 0.02 being 2%"),
        (["a.py", "b.py", "--budget-seconds", "x"], "allowed: a number > 0"),
        (["a.py", "b.py", "--wrong"], "unrecognized arguments: --wrong"),
        (["--baseline", "nowhere.yaml"], "--baseline nowhere.yaml cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(asked, capsys, words, said):
    assert asked(*words) == (2,)
    error = capsys.readouterr().err
    assert error.startswith("perfsearch compare: ") and said in error
    assert len(error.splitlines()) == 1


def test_a_file_says_what_to_compare_with(asked, tmp_path):
    file = tmp_path / "perf.yaml"
    file.write_text("reference: git:main\ncommand: train.py --steps 100\nallowed_slowdown: 0.02\n")
    _, given = asked("--baseline", str(file))
    assert given.arms == ["git:main", "train.py --steps 100"]
    assert (given.command, given.allowed_slowdown) == ("train.py --steps 100", 0.02)
    _, given = asked("--baseline", str(file), "git:HEAD", "--allowed-slowdown", "0.05")
    assert (given.arms, given.allowed_slowdown) == (["git:main", "git:HEAD"], 0.05)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": "x"}, "reference: missing"),
        ({"reference": "a", "comand": "x"}, "comand: no such key. Did you mean 'command'?"),
        ([1], "holds no keys"),
    ],
)
def test_a_file_that_is_wrong_is_named(asked, tmp_path, capsys, keys, said):
    file = tmp_path / "perf.json"
    file.write_text(json.dumps(keys))
    assert asked("--baseline", str(file)) == (2,)
    assert said in capsys.readouterr().err


def test_help_is_printed(asked, capsys):
    assert asked("--help") == (0,)
    text = capsys.readouterr().out
    assert "git:REVISION" in text and "Exit: 0 faster, 4 no difference" in text
    assert asked() == (2,)
