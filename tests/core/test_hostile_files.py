"""Files of settings and journals from somebody else: read, or refused in one line."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from support.hostile import DEEP, PLAIN, SCALARS, any_text, at_most

from perfsearch.api import read_knobs
from perfsearch.config.schema import GROUPS, validate
from perfsearch.core import journal, settings_file
from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Kind, Knob, Numerics
from perfsearch.core.narrow import narrow
from perfsearch.knobs.transport import read_knobs as read_knob_file

BUCKET = Knob("bucket_cap_mb", Kind.REAL, 25.0, low=1, high=512, log=True, unit="MiB")
SOCKETS = Knob("sockets", Kind.ORDINAL, None, values=(None, 1, 2, 4))
COUNT = Knob("count", Kind.INTEGER, 4, low=1, high=64)
MODE = Knob("mode", Kind.CATEGORICAL, "none", values=("none", "fast"))

TEXTS = some.one_of(
    some.binary(max_size=60),
    PLAIN.map(lambda value: json.dumps(value).encode()),
    PLAIN.map(lambda value: json.dumps({"runner": {"name": "ddp", "knobs": value}}).encode()),
    some.dictionaries(some.sampled_from(["bucket_cap_mb", "zero_stage", "x"]), PLAIN).map(
        lambda knobs: json.dumps({"runner": {"name": "ddp", "knobs": knobs}}).encode()
    ),
)
BOMB = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 8)) for i in range(9)
)


def require_told(error):
    assert str(error)


@settings(max_examples=50, deadline=None)
@given(TEXTS, some.sampled_from(["config.yaml", "config.json"]))
@example(DEEP, "config.json")
@example(DEEP, "config.yaml")
@example(BOMB, "config.yaml")
@example(b"? [a]\n: 1\n", "config.yaml")
@example(b"? {a: 1}\n: 1\n", "config.yaml")
@example(b"a: !!python/object:os.system x", "config.yaml")
@example(b"a: 2024-13-45\n", "config.yaml")
@example(b"\xff\xfe", "config.yaml")
@example(b"{runner: {name: ddp, knobs: [[null, n]]}}", "config.yaml")
def test_a_file_of_knobs_is_read_or_refused(tmp_path_factory, raw, name):
    file = tmp_path_factory.mktemp("f") / name
    file.write_bytes(raw)
    for read in (read_knobs, lambda path: read_knob_file(str(path))):
        try:
            read(file)
        except BadInputError as error:
            require_told(error)


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "config.yaml"
    with file.open("wb") as opened:
        opened.truncate(2**33)  # a sparse one
    most = 2 * settings_file.MOST_READ / 2**20 + 1
    with at_most(most), pytest.raises(ValueError, match="is larger than 16 MiB"):
        settings_file.read_settings(file)


def test_values_that_aliases_multiply_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    for text in (BOMB, b"a: &a [*a]\n"):
        file.write_bytes(text)
        with pytest.raises(ValueError, match="holds more than 100,000 values"):
            settings_file.read_settings(file)


@settings(max_examples=50, deadline=None)
@given(some.dictionaries(some.one_of(any_text(max_size=8), some.sampled_from(
    ["seed", "budget", "objective", "confirm", "tracking", "metrics", "limits", "run_dir", *GROUPS]
)), PLAIN, max_size=4))  # fmt: skip
@example({"seed": 10**400})
@example({"objective": {"min_gain": 10**400}})
def test_settings_are_taken_or_refused(given_keys):
    base = {"runner": {"name": "ddp"}, "strategy": {"name": "grid"}, "workload": {"name": "mlp"}}
    try:
        validate({**base, **given_keys})
    except BadInputError as error:
        require_told(error)


RANGES = some.dictionaries(
    some.sampled_from(["min", "max", "log", "step", "x"]),
    some.one_of(SCALARS, some.floats(-10, 600), some.integers(-3, 70)),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(
    some.dictionaries(
        some.sampled_from(["bucket_cap_mb", "sockets", "count", "mode"]),
        some.one_of(PLAIN, RANGES, some.lists(SCALARS, max_size=4)),
        max_size=4,
    )
)
@example({"count": {"step": 10**400}})
@example({"count": {"min": -(10**400)}, "bucket_cap_mb": 10**400, "sockets": [10**400]})
def test_what_is_asked_of_knobs_is_taken_or_refused(asked):
    try:
        searched, _ = narrow([BUCKET, SOCKETS, COUNT, MODE], asked, Numerics.ALTERING)
    except BadInputError:
        return
    for knob in searched:
        assert knob.count is None or 1 <= knob.count <= 100_000
        for position in (0.0, 0.3, 1.0):
            if knob.is_range:
                assert knob.contains(knob.from_unit(position))
            else:
                assert len(knob.values) == len({(type(v) is bool, v) for v in knob.values})


EVENT = some.fixed_dictionaries(
    {"n": some.one_of(some.just(1), SCALARS), "event": some.sampled_from([*journal.EVENTS, "odd"])},
    optional={"trial": PLAIN, "parameters": PLAIN, "definition": PLAIN, "configuration": PLAIN},
)


@settings(max_examples=50, deadline=None)
@given(
    some.one_of(
        some.binary(max_size=80),
        some.tuples(PLAIN, EVENT).map(
            lambda two: b"".join(json.dumps(one).encode() + b"\n" for one in two)
        ),
        some.tuples(
            some.fixed_dictionaries({"schema": some.just(1), "identity": PLAIN}), EVENT
        ).map(lambda two: b"".join(json.dumps(one).encode() + b"\n" for one in two)),
    )
)
@example(b'{"schema":1}\n' + DEEP + b"\n" + b"{}\n")
@example(b'{"schema":2}\n')
def test_a_journal_is_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("j") / journal.JOURNAL
    path.write_bytes(raw)
    try:
        journal.measured_as(*journal.read(path))
        journal.Journal.reopen(path).close()
    except journal.JournalError as error:
        require_told(error)


def test_a_huge_journal_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_READ", 2**20)
    path = tmp_path / journal.JOURNAL
    with path.open("wb") as file:
        file.truncate(2**33)
    with at_most(4), pytest.raises(journal.JournalError, match="is larger than"):
        journal.read(path)
