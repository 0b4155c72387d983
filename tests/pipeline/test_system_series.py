from __future__ import annotations

import json

import pytest

from perfsearch.pipeline.record import keep_series


def samples(begin, count=3, **values):
    return [{"time_s": begin + i, "node": 0, **values} for i in range(count)]


def on_disk(directory):
    return [json.loads(line) for line in (directory / "system.jsonl").read_text().splitlines()]


def test_samples_of_an_interrupted_session_stand_before_those_of_the_next(tmp_path):
    """What passes between the two, here an hour, is not drawn."""
    keep_series(tmp_path, samples(100.0, cpu=1.0), 1.0)
    found = keep_series(tmp_path, samples(3700.0, cpu=2.0), 1.0)
    assert [s["time_s"] for s in found] == [3697.0, 3698.0, 3699.0, 3700.0, 3701.0, 3702.0]
    assert [s["cpu"] for s in found] == [1.0] * 3 + [2.0] * 3
    assert on_disk(tmp_path) == found
    third = keep_series(tmp_path, samples(9000.0), 1.0)
    assert [s["time_s"] for s in third][:3] == [8994.0, 8995.0, 8996.0]


def test_a_session_that_is_kept_twice_is_kept_once(tmp_path):
    keep_series(tmp_path, samples(100.0), 1.0)
    assert keep_series(tmp_path, samples(100.0, 5), 1.0) == samples(100.0, 5)


@pytest.mark.parametrize("text", ["{broken", "[1, 2]\n", '{"node": 0}\n', '{"time_s": "x"}\n'])
def test_a_file_that_is_no_series_ends_nothing(text, tmp_path):
    (tmp_path / "system.jsonl").write_text(text)
    assert keep_series(tmp_path, samples(100.0), 1.0) == samples(100.0)


def test_without_samples_earlier_ones_are_left_as_they_are(tmp_path):
    keep_series(tmp_path, samples(100.0), 1.0)
    assert keep_series(tmp_path, [], 1.0) == []
    assert on_disk(tmp_path) == samples(100.0)
