from __future__ import annotations

import json

import pytest

from perfsearch.tracking.spool import FILE_NAME, Spool, read


def test_records_come_back_in_order_and_a_torn_line_is_left_out(tmp_path):
    first = Spool(tmp_path)
    first.append({"kind": "a"})
    first.close()
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"schema": 1, "kind": "to')
    second = Spool(tmp_path)
    second.append({"kind": "b"})
    second.close()
    assert [r["kind"] for r in read(tmp_path)] == ["a", "b"]


def test_one_writer_at_a_time(tmp_path):
    first, second = Spool(tmp_path), Spool(tmp_path)
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()
    second.close()


def test_another_schema_is_refused_with_its_version(tmp_path):
    (tmp_path / FILE_NAME).write_text(json.dumps({"schema": 9, "kind": "open"}) + "\n")
    with pytest.raises(ValueError, match="schema version 9"):
        list(read(tmp_path))
