import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsearch.core.journal import SCHEMA, Journal, JournalError, JournalWriteError, read


def make(path: Path) -> Journal:
    journal = Journal(path, {"identity": {"torch": "2.13.0"}})
    journal.append("opened", pid=1)
    journal.append("asked", configuration={"a": 1})
    return journal


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    journal = make(tmp_path / "journal.jsonl")
    header, events = read(journal.path)
    assert header == {"schema": SCHEMA, "identity": {"torch": "2.13.0"}}
    assert [(e.number, e.name) for e in events] == [(1, "opened"), (2, "asked")]
    assert events == journal.events


def test_reopening_goes_on_counting(tmp_path: Path) -> None:
    make(tmp_path / "j").close()
    journal = Journal.reopen(tmp_path / "j")
    assert journal.append("told", trial=0).number == 3
    assert not journal.ended
    journal.append("ended", exit_code=0)
    assert journal.ended
    journal.append("opened", pid=2)
    assert not journal.ended


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 60))
def test_a_torn_last_line_is_dropped_wherever_it_was_cut(cut: int, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    make(path).close()
    raw = path.read_bytes()
    last = raw[:-1].rpartition(b"\n")[2] + b"\n"
    path.write_bytes(raw[: len(raw) - min(cut, len(last) - 1)])
    journal = Journal.reopen(path)
    assert [e.name for e in journal.events] == ["opened"]
    assert journal.dropped_line
    journal.append("asked", configuration={"a": 2})
    assert [e.data for e in read(path)[1]][-1] == {"configuration": {"a": 2}}


def test_an_unknown_schema_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(json.dumps({"schema": 99}) + "\n")
    with pytest.raises(JournalError, match="schema 99, and this perfsearch reads 1"):
        Journal.reopen(tmp_path / "j")


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "j").close()
    lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text("\n".join([lines[0], "{torn", lines[2]]) + "\n")
    with pytest.raises(JournalError, match="line 2 is damaged"):
        Journal.reopen(tmp_path / "j")


def test_what_is_out_of_order_and_what_is_unknown_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path / "j").close()
    lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text("\n".join([lines[0], lines[2]]) + "\n")
    with pytest.raises(JournalError, match="line 2 is out of order: its number is 2, and 1 is"):
        read(tmp_path / "j")
    later = lines[2].replace("asked", "dreamt")
    (tmp_path / "j").write_text("\n".join([*lines[:2], later]) + "\n")
    with pytest.raises(JournalError, match=r"line 3 tells of 'dreamt', and .* knows opened, asked"):
        read(tmp_path / "j")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: Is a directory"),
        ("", "has no complete first line"),
        ('{"sch', "has no complete first line"),
        ('{torn\n{"n":1}\n', "line 1 is damaged"),
    ],
)
def test_a_journal_that_cannot_be_used_is_refused_with_two_ways_out(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is None:
        (tmp_path / "j").mkdir()
    else:
        (tmp_path / "j").write_text(content)
    with pytest.raises(JournalError, match=rf"{message}. Use resume=never .*move the directory"):
        read(tmp_path / "j")


def test_an_existing_journal_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "j").close()
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(JournalError, match="cannot be created"):
        make(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before


def test_a_full_disk_leaves_a_valid_journal(tmp_path: Path, monkeypatch) -> None:
    journal = make(tmp_path / "j")
    real = os.write

    def half_then_full(descriptor: int, data: bytes) -> int:
        if len(data) > 8:
            return real(descriptor, data[:8])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(JournalWriteError, match="No space left"):
        journal.append("told", trial=0, padding="x" * 7)
    monkeypatch.undo()
    assert [e.name for e in read(journal.path)[1]] == ["opened", "asked"]


def test_an_interrupt_in_the_middle_of_an_event_leaves_none_of_it(
    tmp_path: Path, monkeypatch
) -> None:
    journal = make(tmp_path / "j")
    for call in (os.write, os.fsync):
        real = call

        def interrupted(*arguments, real=real):
            real(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, call.__name__, interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append("told", trial=0)
        monkeypatch.undo()
        assert len(journal.events) == len(read(journal.path)[1]) == 2
    journal.append("told", trial=0)
    assert [e.number for e in read(journal.path)[1]] == [1, 2, 3]


def test_a_kill_in_the_first_line_leaves_no_journal(tmp_path: Path, monkeypatch) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt  # the line is written and the journal is not yet there

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "j")
    monkeypatch.undo()
    assert not (tmp_path / "j").exists()
    assert len(make(tmp_path / "j").events) == 2


def test_a_journal_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch) -> None:
    make(tmp_path / "j").close()

    def read_only(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(JournalError, match="cannot be written: Read-only"):
        Journal.reopen(tmp_path / "j")


def test_numbers_that_are_not_finite_never_reach_the_file(tmp_path: Path) -> None:
    journal = make(tmp_path / "j")
    with pytest.raises(ValueError, match="JSON compliant"):
        journal.append("finished", cost=float("nan"))
    assert len(read(journal.path)[1]) == 2


def test_secrets_are_masked_in_header_and_events(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", {"identity": {"workload": "script t.py --token=a9SECRET"}})
    journal.append("opened", parameters={"a": ["--api_key", "b9SECRET"], "password": "c9SECRET"})
    journal.close()
    again = Journal.reopen(journal.path)
    again.append("told", reason="postgres://u:d9SECRET@h/x refused")
    assert "SECRET" not in journal.path.read_text()
    assert again.events[1].data["reason"] == "postgres://***@h/x refused"


def test_events_that_are_no_longer_held_are_read_from_the_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", {})
    journal.append("asked", configuration={"x": 1})
    journal.hold_no_more()
    journal.append("asked", configuration={"x": 2})
    assert [e.data["configuration"]["x"] for e in journal.events] == [1, 2]
    assert [e.number for e in journal.events] == [1, 2]
    journal.close()
    assert len(Journal.reopen(tmp_path / "journal.jsonl").events) == 2


def test_a_journal_that_was_removed_takes_nothing_more(tmp_path: Path) -> None:
    """What is written to a removed file is lost, and would be found out at the very end."""
    for place, remove in (("a", lambda path: path.unlink()), ("b", lambda path: path.rename("c"))):
        (tmp_path / place).mkdir()
        journal = make(tmp_path / place / "j")
        path = journal.path if place == "a" else journal.path.parent
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            remove(path)
        with pytest.raises(JournalWriteError, match="was removed or moved away while the search"):
            journal.append("told", trial=0)
        assert [e.name for e in journal.events] == ["opened", "asked"]
        journal.close()
    assert [e.name for e in read(tmp_path / "c" / "j")[1]] == ["opened", "asked"]
