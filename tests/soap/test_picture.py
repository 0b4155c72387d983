"""The picture of a plan."""

import xml.etree.ElementTree as tree

from support.soap_graphs import batch_input, linear, on

from perfsearch.soap.graph import Graph
from perfsearch.soap.picture import picture, rows

X = batch_input("x", (8, 16))
MADE = [X]
for number in range(4):
    MADE.append(linear(f"layer<{number}>", MADE[-1], 16))
GRAPH = Graph(tuple(MADE), frozenset({"x"}), MADE[-1].name, 8)
SPLITS = [on((2, 1), 0, 1), on((2, 1), 0, 1), on((1, 2), 1, 0), on((1, 1), 1)]
PLAN = {o.name: chosen for o, chosen in zip(GRAPH.planned, SPLITS, strict=True)}


def test_like_operators_that_follow_each_other_are_one_row():
    found = rows(GRAPH, PLAN)
    assert [(row.words, row.split) for row in found] == [
        ("layer<0> to layer<1> (2 operators)", "samples"),
        ("layer<2> (linear 8x16)", "parameters"),
        ("layer<3> (linear 8x16)", "whole"),
    ]


def test_each_part_is_a_cell_in_the_column_of_its_device():
    drawn = tree.fromstring(picture(GRAPH, PLAN, 2))
    words = [e.text for e in drawn.iter() if e.tag.endswith("text")]
    assert "layer<0> to layer<1> (2 operators)" in words
    cells = {
        (e.get("y"), e.get("x")): e.get("fill")
        for e in drawn.iter()
        if e.tag.endswith("rect") and e.get("y") and int(e.get("x")) >= 380
    }
    assert len(cells) == 5
    assert len(set(cells.values())) == 3
    texts = {(e.get("y"), e.get("x")): e.text for e in drawn.iter() if e.tag.endswith("text")}
    second = [(int(x), t) for (y, x), t in texts.items() if y == "81" and int(x) >= 380]
    assert sorted(second) == [(384, "2/2"), (448, "1/2")]  # its parts are in reverse


def test_many_devices_have_narrow_cells_without_words():
    drawn = picture(GRAPH, PLAN, 64)
    assert "1/2" not in drawn
    tree.fromstring(drawn)
