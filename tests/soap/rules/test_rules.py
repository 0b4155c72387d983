"""What rules say that a part reads is enough to compute it, and what axes mean."""

import random

import pytest
import torch
from support import soap_models
from torch.utils._pytree import tree_flatten

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.executor.kernels import forward
from perfsearch.soap.graph import (
    INPUT,
    Folded,
    Joined,
    Strided,
    Unfolded,
    Window,
    hull,
    intersection,
    volume,
    within,
)
from perfsearch.soap.plan import OperatorConfiguration, choices, parameters, part_rectangles
from perfsearch.soap.rules.base import input_rectangle, parameter_rectangles

NOT_ALONE = {"batch_norm", "class_loss", "elementwise_loss", "total"}


def cut(tensor, rectangle):
    return tensor[tuple(slice(*span) for span in rectangle)]


def part_of(operator, rectangle, values, weights):
    inputs = []
    for index, name in enumerate(operator.inputs):
        need = input_rectangle(operator, index, rectangle)
        inputs.append(None if need is None else cut(values[name], need))
    reads = parameter_rectangles(operator, rectangle)
    read = {p.name: cut(weights[p.key], reads[p.name]) for p in operator.parameters}
    torch.manual_seed(0)
    return forward(operator, rectangle, inputs, read)


ODD = [
    "cells",
    "contractions",
    "gathered",
    "gru_cells",
    "last_hidden",
    "lstm_outputs",
    "moved",
    "ordered",
    "plain_cells",
    "scaled_addmm",
    "transposed_weights",
    "with_state",
]


@pytest.mark.parametrize("name", ["mlp", "dlrm", "conv", "transformer", *ODD])
def test_parts_of_every_operator_are_pieces_of_the_whole(name):
    model, loss, _, batches = soap_models.make(name, 1)
    captured = capture(model, loss, batches[0])
    views = parameters(captured.graph)
    weights = {k: p.detach().view(views[k].shape) for k, p in model.named_parameters()}
    values = dict(zip(captured.leaves, tree_flatten(batches[0])[0], strict=True))
    buffers = dict(model.named_buffers())
    values.update({place: buffers[n] for place, n in captured.buffers.items()})
    values.update(captured.constants)
    rng = random.Random(2)
    for operator in captured.graph.operators:
        if operator.kind == INPUT:
            continue
        whole = values[operator.name] = part_of(operator, operator.whole, values, weights)
        if operator.kind in NOT_ALONE:
            continue
        for degrees in rng.sample(choices(operator, 6), min(4, len(choices(operator, 6)))):
            for part in part_rectangles(operator, OperatorConfiguration(degrees, ())):
                mine = part_of(operator, part, values, weights)
                torch.testing.assert_close(mine, cut(whole, part), rtol=1e-10, atol=1e-12)


def test_shares_of_a_loss_add_up():
    model, loss, _, batches = soap_models.make("mlp", 1)
    graph = capture(model, loss, batches[0]).graph
    operator = graph.by_name[graph.output]
    values = {operator.inputs[0]: torch.randn(soap_models.BATCH, 3).double()}
    values[operator.inputs[1]] = torch.randn(soap_models.BATCH, 3).double()
    whole = part_of(operator, operator.whole, values, {})
    parts = part_rectangles(operator, OperatorConfiguration((4, 2), ()))
    shares = [part_of(operator, part, values, {}) for part in parts]
    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize(
    ("axis", "span", "read"),
    [
        (Window(0, size=10, kernel=3, stride=1, padding=1), (0, 5), (0, 6)),
        (Window(0, size=10, kernel=3, stride=1, padding=1), (5, 10), (4, 10)),
        (Window(0, size=10, kernel=3, stride=2, padding=0), (1, 3), (2, 7)),
        (Window(0, size=10, kernel=3, stride=1, padding=2, dilation=2), (4, 6), (2, 8)),
        (Strided(0, start=3, step=2), (1, 4), (5, 10)),
        (Joined(0, offset=4, size=3), (0, 4), (0, 0)),
        (Joined(0, offset=4, size=3), (5, 20), (1, 3)),
        (Unfolded(0, block=4), (1, 3), (4, 12)),
        (Folded(0, block=4), (3, 9), (0, 3)),
    ],
)
def test_axes(axis, span, read):
    assert axis.reads((span,)) == read


def test_parts_cover_the_whole_once_the_first_being_larger():
    operator = next(
        o
        for o in capture(
            *soap_models.make("mlp", 1)[:2], soap_models.make("mlp", 1)[3][0]
        ).graph.planned
        if o.name == "enter"
    )
    parts = part_rectangles(operator, OperatorConfiguration((3, 4), ()))
    assert parts[:2] == [((0, 5), (0, 3)), ((0, 5), (3, 6))]
    assert parts[-1] == ((9, 13), (8, 10))
    assert sum(volume(part) for part in parts) == 13 * 10
    assert hull(parts) == operator.whole
    assert all(intersection(a, b) is None for a in parts for b in parts if a != b)
    assert within(parts[1], operator.whole) == (slice(0, 5), slice(3, 6))
