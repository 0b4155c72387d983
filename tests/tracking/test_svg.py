from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from perfsearch.tracking.svg import Axis, Canvas, number


def test_ticks_are_round_and_inside():
    assert Axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    ticks = Axis(54.0, 205.0, 0, 100).ticks()
    assert all(54 <= t <= 205 for t in ticks)
    assert 3 <= len(ticks) <= 7


def test_ticks_of_what_is_counted_are_whole():
    assert Axis(-0.06, 3.06, 0, 100, whole=True).ticks() == [0, 1, 2, 3]
    assert Axis(-0.5, 0.5, 0, 100, whole=True).ticks() == [0]
    assert Axis.around([0, 9], 0, 100, whole=True).ticks() == [0, 3, 6, 9]


@pytest.mark.parametrize("values", [[], [5.0], [0.0], [3.0, 3.0], [float("nan")]])
def test_a_scale_always_has_an_extent(values):
    axis = Axis.around(values, 0, 100)
    assert axis.low < axis.high
    assert axis.ticks()


def test_what_is_drawn_is_well_formed_and_escaped():
    canvas = Canvas(100, 50, 'a "label" & <more>')
    canvas.text((1, 2), "<script>alert(1)</script>")
    canvas.dot((1, 2), "trial", "a < b")
    canvas.cross((1, 2), "failed", "x & y")
    canvas.frame(Axis(0, 1, 0, 9), Axis(0, 1, 9, 0), "x", "y")
    root = ElementTree.fromstring(canvas.render())
    assert "<script>" in next(e.text or "" for e in root.iter() if e.tag == "text")


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.12345, 12.0, 1234.5, 1.5e7)] == [
        "0",
        "0.1235",
        "12",
        "1,234",
        "1.5e+07",
    ]
