"""Messages between any two splittings, and the collectives that they are."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import soap_models
from support.soap_ranks import random_plan

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.executor.exchange import Gatherer
from perfsearch.soap.executor.rank_plan import buckets
from perfsearch.soap.graph import holds, share, volume
from perfsearch.soap.plan import (
    Pattern,
    Redistribution,
    cells,
    data_parallel,
    messages,
    parameters,
    pattern,
    placements,
    redistributions,
    tiles,
)

SHAPE = (7, 5)


@st.composite
def splitting(draw):
    degrees = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    count = degrees[0] * degrees[1]
    devices = draw(st.permutations(range(6)))[:count]
    spans = [[share(n, d, i) for i in range(d)] for n, d in zip(SHAPE, degrees, strict=True)]
    return dict(zip(devices, [(a, b) for a in spans[0] for b in spans[1]], strict=True))


@settings(max_examples=60, deadline=None)
@given(owned=splitting(), needed=splitting())
def test_every_device_gets_each_element_that_it_needs_once(owned, needed):
    whole = torch.arange(35.0).view(SHAPE)
    moves = messages(owned, needed)
    assert list(moves) == sorted(moves, key=lambda m: (m.destination, m.source))
    for device, need in needed.items():
        pieces = [m.rectangle for m in moves if m.destination == device]
        assert sum(volume(piece) for piece in pieces) == volume(need)
        values = [whole[tuple(slice(*s) for s in piece)] for piece in pieces]
        wanted = whole[tuple(slice(*s) for s in need)]
        assert torch.equal(Gatherer(need, pieces, add=False)(values), wanted)


def test_gradients_of_pieces_that_overlap_are_summed():
    gather = Gatherer(((0, 4),), [((0, 3),), ((1, 4),)], add=True)
    assert gather([torch.ones(3), torch.ones(3)]).tolist() == [1, 2, 2, 1]
    gather = Gatherer(((0, 4),), [((0, 2),)], add=True)
    assert gather([torch.ones(2)]).tolist() == [1, 1, 0, 0]


def rows(*devices):
    return {d: (share(8, len(devices), i), (0, 4)) for i, d in enumerate(devices)}


def columns(*devices):
    return {d: ((0, 8), share(4, len(devices), i)) for i, d in enumerate(devices)}


def everything(*devices):
    return dict.fromkeys(devices, ((0, 8), (0, 4)))


@pytest.mark.parametrize(
    ("owned", "needed", "expected"),
    [
        (rows(0, 1), rows(0, 1), Pattern.LOCAL),
        (everything(2), rows(2), Pattern.LOCAL),
        (rows(0, 1, 2, 3), everything(0, 1, 2, 3), Pattern.ALL_GATHER),
        (columns(0, 1), everything(0, 1), Pattern.ALL_GATHER),
        (rows(1, 0), everything(0, 1), Pattern.ALL_TO_ALL),  # another order than that of ranks
        (rows(0, 1, 2), everything(0, 1, 2), Pattern.ALL_TO_ALL),  # uneven
        (everything(1), everything(0, 1, 2), Pattern.BROADCAST),
        (everything(1), everything(0), Pattern.POINT_TO_POINT),
        (everything(1), rows(0, 1, 2), Pattern.POINT_TO_POINT),
        (rows(0, 1), columns(0, 1), Pattern.ALL_TO_ALL),
        (rows(0, 1), rows(2, 3), Pattern.POINT_TO_POINT),
        (rows(0, 1), everything(0, 2), Pattern.POINT_TO_POINT),
    ],
)
def test_collectives_are_recognised(owned, needed, expected):
    found = Redistribution("x", owned, needed, messages(owned, needed))
    assert pattern(found) is expected
    if expected is Pattern.LOCAL:
        assert found.participants == ()


def test_consumers_that_need_the_same_share_a_redistribution():
    model, loss, _, batches = soap_models.make("transformer", 1)
    graph = capture(model, loss, batches[0]).graph
    moves = redistributions(graph, placements(graph, data_parallel(graph, range(4)), 4))
    norm = [m for m in moves if m.producer == "blocks.0.norm"]
    assert len(norm) == 1 and len(norm[0].consumers) == 3
    # 13 sequences are shared out otherwise than their 65 tokens, which begins at the head
    assert {m.producer for m in moves if pattern(m) is not Pattern.LOCAL} == {"norm"}


def test_tied_parameters_are_cut_where_holders_differ():
    found = cells("w", {0: ((0, 6), (0, 2)), 1: ((0, 4), (0, 2)), 2: ((4, 6), (0, 2))})
    assert {(c.rectangle[0], c.devices) for c in found} == {((0, 4), (0, 1)), ((4, 6), (0, 2))}
    found = cells("w", {0: ((0, 3),), 1: ((3, 6),), 2: ((0, 3),)})
    assert {(c.rectangle[0], c.devices) for c in found} == {((0, 3), (0, 2)), ((3, 6), (1,))}


@pytest.mark.parametrize("name", ["dlrm", "transformer"])
def test_buckets_hold_what_is_really_replicated(name):
    """Not the whole weight: only tiles that several devices store, each once."""
    model, loss, _, batches = soap_models.make(name, 1)
    graph = capture(model, loss, batches[0]).graph
    rng = random.Random(4)
    for _ in range(10):
        placed = placements(graph, random_plan(graph, 4, rng), 4)
        stored = [tiles(graph, mine) for mine in placed]
        plan = buckets(graph, placed, capacity_bytes=300)
        for key, parameter in parameters(graph).items():
            counts = torch.zeros(parameter.shape)
            for tile in (s[key] for s in stored if key in s):
                counts[tuple(slice(*span) for span in tile.rectangle)] += 1
            assert counts.min() >= 1  # somebody trains every element
            summed = torch.zeros(parameter.shape)
            for bucket in plan:
                for cell in (c for c in bucket.cells if c.key == key):
                    place = tuple(slice(*span) for span in cell.rectangle)
                    summed[place] += 1
                    assert counts[place].eq(len(bucket.devices)).all()
                    for device in bucket.devices:
                        assert holds(stored[device][key].rectangle, cell.rectangle)
            assert torch.equal(summed, (counts > 1).float())
        assert [b.ready for b in plan] == sorted((b.ready for b in plan), reverse=True)
