"""Where samples are known, and where they are not: the split of what has no rule is tried first."""

import pytest
import torch
from support import soap_models
from support.soap_public import PUBLIC, make_public
from torch import nn
from torch.nn import functional

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.formats import NotRegular, module_shardings
from perfsearch.soap.graph import WHOLE, Role, coverage
from perfsearch.soap.plan import data_parallel, left_on_one_device
from perfsearch.soap.rules.base import input_rectangle, parameter_rectangles


def graph_of(name):
    model, loss, _, batches = soap_models.make(name, 1)
    return capture(model, loss, batches[0]).graph


@pytest.mark.parametrize("name", PUBLIC)
def test_data_parallelism_of_public_models_leaves_nothing_on_one_device(name):
    graph = capture(*make_public(name)).graph
    assert left_on_one_device(graph).share == 0
    assert {len(c.devices) for c in data_parallel(graph, range(3)).values()} == {3}


NOT_BY_SAMPLE = {
    "by_frequency": "embedding",  # its outputs are by sample, its gradients not
    "batch_statistics": "cdist",
    "moments": "std_mean",
}


@pytest.mark.parametrize(("name", "function"), NOT_BY_SAMPLE.items())
def test_what_mixes_samples_runs_whole_and_is_named_with_its_share(name, function):
    graph = graph_of(name)
    assert any(f"aten.{function}." in o.attributes["target"] for o in coverage(graph).missing)
    left = left_on_one_device(graph)
    assert 0 < left.share <= 1
    assert sum(share for _, share in left.causes) == pytest.approx(left.share)
    parallel = data_parallel(graph, range(2))
    for cause, _ in left.causes:
        before = [parallel[n] for n in cause.inputs if n in parallel]
        assert all(len(configuration.devices) == 2 for configuration in before)


@pytest.mark.parametrize(
    "name", ["normalised_cell", "rows_inverted", "native_norm", "grouped_queries", "repeated"]
)
def test_functions_without_a_rule_are_split_over_samples_where_halves_give_the_same(name):
    graph = graph_of(name)
    assert all(o.kind != WHOLE for o in graph.planned)
    assert left_on_one_device(graph).share == 0


class MergedRows(nn.Module):
    """As torch's own attention: positions first, samples second, and both merged for a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = x.view(-1, 2, 4).transpose(0, 1)
        return self.layer(y.reshape(-1, 4)).view(2, len(x), 4).transpose(0, 1)


def test_rows_that_are_merged_for_a_linear_layer_keep_their_samples():
    graph = capture(MergedRows(), squared, (torch.randn(6, 8),)).graph
    assert left_on_one_device(graph).share == 0
    # the module itself sees merged rows, which is another sharding
    with pytest.raises(NotRegular, match="rows in one dimension"):
        module_shardings(graph, data_parallel(graph, range(2)), 2)


def test_labels_are_merged_whatever_comes_first():
    graph = graph_of("class_token")
    kinds = {o.kind: o.roles for o in graph.planned}
    assert kinds["concatenate"][0] is Role.SAMPLE
    assert kinds["stack"][0] is Role.SAMPLE


@pytest.mark.parametrize("name", ["lstm_dropout", "lstm_outputs", "gru_dropout", "time_first"])
def test_a_recurrent_layer_is_one_operator_whatever_outputs_are_used(name):
    graph = graph_of(name)
    layers = [o for o in graph.planned if o.kind == "recurrent"]
    assert len(layers) == 1
    assert len(layers[0].attributes["pack"]) >= 2
    assert layers[0].roles[0] is Role.SAMPLE
    assert layers[0].flops > 2 * 7 * 4 * 2 * 8  # positions times weights, not elements


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("cells", 4), ("decoder", 4), ("last_hidden", 4), ("gated_graph", 3), ("plain_cells", 1)],
)
def test_a_cell_can_be_split_by_hidden_elements_each_with_its_rows_of_every_gate(name, blocks):
    graph = graph_of(name)
    cells = [o for o in graph.planned if o.kind == "recurrent_cell"]
    assert len(cells) >= 2
    for cell in cells:
        assert cell.roles[-2:] == (Role.SAMPLE, Role.PARAMETER)
        hidden = cell.shape[-1]
        part = (*cell.whole[:-1], (1, 3))
        reads = parameter_rectangles(cell, part)
        assert reads["w_hh"] == ((0, blocks), (1, 3), (0, hidden))
        assert input_rectangle(cell, 1, part)[-1] == (0, hidden)  # all of the state before
        if len(cell.inputs) > 2:
            assert input_rectangle(cell, 2, part)[-1] == (1, 3)  # its own of the memory


def test_a_cell_whose_weights_something_else_reads_is_split_over_samples_alone():
    graph = graph_of("penalised_cell")
    (cell,) = [o for o in graph.planned if o.kind == "recurrent_cell"]
    assert cell.roles == (Role.SAMPLE, None)
    assert [p.shape for p in cell.parameters] == [(24, 8), (24, 8), (24,), (24,)]


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        held = self.first(x)
        noise = torch.randn_like(x)
        dropped = functional.dropout(self.second(x), 0.5)
        return functional.dropout(held, 0.5) + dropped * noise


def squared(model, batch):
    return model(batch[0]).square().mean()


def test_numbers_are_drawn_in_the_order_of_the_program():
    graph = capture(Reused(), squared, (torch.randn(6, 4),)).graph
    drawn = [
        (operator.name, stage.kind)
        for operator in graph.operators
        for stage in operator.stages
        if stage.kind in ("random", "dropout")
    ]
    assert [kind for _, kind in drawn] == ["random", "dropout", "dropout"]
    assert drawn[1][0] == "second"  # joined, since nothing is drawn in between
    assert drawn[2][0] not in ("first", "second")


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 4, 2, dropout=0.5)

    def forward(self, x):
        lengths = torch.tensor([2, 2, 1], device="cpu")
        sequence = nn.utils.rnn.pack_padded_sequence(x.view(3, 2, 4), lengths, batch_first=True)
        return self.cell(sequence)[0].data


def test_what_draws_by_an_argument_in_a_form_without_a_rule_is_refused():
    with pytest.raises(CaptureError):
        capture(Packed(), squared, (torch.randn(3, 8),))


def test_rows_that_are_taken_apart_in_two_steps_are_those_of_the_weight():
    graph = graph_of("class_query")
    weights = [p for o in graph.planned for p in o.parameters if p.key == "inner.weight"]
    assert [p.shape for p in weights] == [(1, 2, 4, 8)]
