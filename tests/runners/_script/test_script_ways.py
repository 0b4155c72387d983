"""How a script is started where nobody says it: as python does, or by torchrun."""

import json
from dataclasses import asdict

import pytest

from perfsearch.core.hardware import Gpu, Hardware
from perfsearch.core.trial import Outcome, Status
from perfsearch.runners._script.ways import Finder, Way
from perfsearch.workers.messages import RankError, rank_error_file, rank_log

GPUS = tuple(Gpu(f"GPU-{n}", "H100", 80.0) for n in range(4))


def finder(gpus=(), asked=None, **more):
    ranks = asked or len(gpus) or 2
    return Finder(asked, Hardware("cuda" if gpus else "cpu", ranks, 1, gpus, 8), **more)


@pytest.mark.parametrize(
    ("found", "way"),
    [
        (finder(), Way(1, False)),
        (finder(GPUS[:1]), Way(1, False)),
        (finder(GPUS), Way(4, True)),
        (finder(asked=1), Way(1, True)),
        (finder(GPUS, asked=2), Way(2, True)),
        (finder(needs_torchrun=True), Way(2, True)),
        (finder(GPUS[:1], needs_torchrun=True), Way(1, True)),
        (finder(GPUS, trains_apart=True), Way(1, False)),
        (finder(needs_torchrun=True, trains_apart=True), Way(1, True)),
        (finder(known=Way(2, True)), Way(2, True)),
    ],
)
def test_ranks_are_made_where_they_are_asked_for_or_needed(found, way):
    assert found.way == way
    assert Way.from_identity(way.to_identity()) == way


def failed(logs, error=None, tail=""):
    """What came of a start whose rank left these last words."""
    rank_log(logs, 0).write_text(tail)
    if error is not None:
        message, source = error
        told = RankError(0, 1.0, "KeyError", message, source, "train", False, "")
        rank_error_file(logs, 0).write_text(json.dumps(asdict(told)))
    return Outcome(Status.CRASH, None, "it failed", str(rank_log(logs, 0)))


@pytest.mark.parametrize(
    ("error", "tail"),
    [
        (("'LOCAL_RANK'", ""), ""),
        (("environment variable RANK expected, but not set", ""), ""),
        (("int() argument must not be 'NoneType'", 'rank = int(os.environ.get("RANK"))'), ""),
        (("Default process group has not been initialized", ""), ""),
        (None, "starting\nplease start me with torchrun\n"),
    ],
)
def test_last_words_that_name_what_torchrun_sets_call_for_it(tmp_path, error, tail):
    one = finder()
    why = one.other(failed(tmp_path, error, tail), apart=False, steps=0)
    assert "one for torchrun (" in why and "with 2 ranks by torchrun; nproc=N for another" in why
    assert one.way == Way(2, True)
    assert not one.other(failed(tmp_path, error, tail), apart=False, steps=0)  # once


def test_other_failures_do_not(tmp_path):
    unrelated = failed(tmp_path, ("'learning_rate'", "config['learning_rate']"), "rank 0, RANKED")
    assert not finder().other(unrelated, apart=False, steps=0)
    named = failed(tmp_path, ("'RANK'", ""))
    assert not finder().other(named, apart=False, steps=1)
    for settled in (finder(asked=1), finder(known=Way(1, False))):
        assert not settled.other(named, apart=False, steps=0)


def test_ranks_that_train_apart_make_room_for_one_process(tmp_path):
    several = finder(GPUS)
    why = several.other(failed(tmp_path), apart=True, steps=1)
    assert "its 4 ranks train apart" in why and why.endswith("started as python starts it")
    assert several.way == Way(1, False)
    several = finder(needs_torchrun=True)
    assert "with 1 rank by torchrun" in several.other(failed(tmp_path), apart=True, steps=1)
    assert not finder(asked=2).other(failed(tmp_path), apart=True, steps=1)
