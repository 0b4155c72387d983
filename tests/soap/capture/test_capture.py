import pytest
import torch
from support import soap_models
from torch import nn
from torch.nn import functional

from perfsearch.soap.capture import trace
from perfsearch.soap.capture.capture import capture
from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.graph import Role, coverage
from perfsearch.soap.plan import (
    OperatorConfiguration,
    PlanError,
    choices,
    data_parallel,
    validate_plan,
)
from perfsearch.soap.rules.base import parameter_rectangles, signature


def graph_of(name):
    model, loss, _, batches = soap_models.make(name, 1)
    return capture(model, loss, batches[0]).graph


def of_module(module, *shape):
    model = module.double().train()
    batch = (torch.randn(4, *shape).double(), torch.randn(4, 1).double())

    def loss(net, pair):
        return functional.mse_loss(net(pair[0]).flatten(1).mean(1, keepdim=True), pair[1])

    return capture(model, loss, batch)


def test_dlrm_is_what_flexflow_has_of_it():
    graph = graph_of("dlrm")
    kinds = [operator.kind for operator in graph.planned]
    assert kinds.count("linear") == 4 and kinds.count("embedding_bag") == 3
    bag = next(o for o in graph.planned if o.kind == "embedding_bag")
    assert bag.roles == (Role.SAMPLE, Role.PARAMETER)
    assert bag.attributes["bag_size"] == 2
    dense = graph.by_name["bottom.0"]
    assert [stage.kind for stage in dense.stages] == ["linear", "pointwise"]
    assert dense.flops == 2 * soap_models.BATCH * 5 * 9
    assert dense.source.split(":")[0].endswith("soap_models.py")
    assert not coverage(graph).missing


def test_tied_weights_have_one_key_and_heads_can_be_split():
    graph = graph_of("transformer")
    tied = [o for o in graph.planned if any(p.key == "tokens.weight" for p in o.parameters)]
    assert [o.kind for o in tied] == ["embedding", "linear"]
    query = graph.by_name["blocks.0.query"]
    assert query.roles == (Role.SAMPLE, Role.PARAMETER, Role.ATTRIBUTE, Role.PARAMETER)
    fused = graph.by_name["fused"]
    assert fused.shape[2] == 4 and fused.roles[2] is Role.PARAMETER  # heads of one projection
    heads = (*fused.whole[:2], (1, 3), *fused.whole[3:])
    assert parameter_rectangles(fused, heads)["weight"] == ((0, 3), (1, 3), (0, 2), (0, 8))
    attention = next(o for o in graph.planned if o.kind == "attention")
    assert attention.roles[2] is not None  # merged heads


def test_fx_gives_the_same_graph_where_export_fails(monkeypatch):
    expected = graph_of("conv")
    monkeypatch.setattr(trace, "_exported", lambda *_: 1 / 0)
    model, loss, _, batches = soap_models.make("conv", 1)
    captured = capture(model, loss, batches[0])
    assert captured.tracer == "fx"
    shapes = [(o.kind, o.shape, o.roles) for o in captured.graph.planned]
    assert shapes == [(o.kind, o.shape, o.roles) for o in expected.planned]
    assert [p.key for o in captured.graph.planned for p in o.parameters] == [
        p.key for o in expected.planned for p in o.parameters
    ]


def test_autocast_is_spelled_out():
    model, loss, _, batches = soap_models.make("mlp", 1)
    batch = tuple(t.float() for t in batches[0])
    graph = capture(model.float(), loss, batch, torch.bfloat16).graph
    assert {o.name: o.dtype for o in graph.planned}["enter"] == "bfloat16"
    assert graph.by_name[graph.output].dtype == "float32"


def test_elementwise_functions_that_torch_does_not_tag_can_be_split():
    layers = [nn.Linear(6, 6), nn.Hardswish(inplace=True), nn.LogSigmoid()]
    assert not coverage(of_module(nn.Sequential(*layers), 6).graph).missing


class Mixed(nn.Module):
    """Functions without a rule, or with one that leaves the type: of both types of operands."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.slope = nn.PReLU()

    def forward(self, x):
        y = self.slope(self.layer(x))
        y = nn.functional.linear(y, self.layer.weight.t())
        return torch.baddbmm(x[:, None], y[:, None], self.layer.weight[None].expand(len(x), 6, 6))


def test_autocast_casts_functions_without_a_rule_as_gpus_do():
    def by_term(model, batch):
        out = model(batch[0]).squeeze(1)
        return nn.functional.cross_entropy(out, batch[1], reduction="none").pow(2).sum()

    batch = (torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    graph = capture(Mixed(), by_term, batch, torch.bfloat16).graph
    found = {o.name: (o.dtype, o.attributes.get("cast")) for o in graph.planned}
    assert found["layer"] == ("bfloat16", "bfloat16")
    assert found["slope.prelu"] == ("float32", "float32")  # of two types: the widest
    assert found["linear_1"] == ("bfloat16", "bfloat16")
    assert found["baddbmm"] == ("bfloat16", "bfloat16")
    assert found["cross_entropy_loss"] == ("float32", "float32")


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        return torch.linalg.inv(torch.cdist(y, y) + torch.ones_like(y[:, :1]))


def test_what_has_no_rule_runs_whole_and_is_named():
    found = coverage(of_module(Strange(), 6).graph)
    assert len(found.missing) == 2 and 0 < found.share < 1
    refusal = found.refusal(0.99)
    assert "linalg_inv" in refusal and "test_capture.py:" in refusal
    assert found.refusal(0.1) is None
    assert "whole on one device" in found.line()


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) + torch.multinomial(x.exp(), 1)


class Overwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        z = y.view(-1)
        return torch.relu_(y) + z.view_as(y)


@pytest.mark.parametrize(
    ("module", "words"), [(Noise, "draws random numbers"), (Overwritten, "writes into a tensor")]
)
def test_what_cannot_be_right_is_refused(module, words):
    with pytest.raises(CaptureError, match=words):
        of_module(module(), 6)


def test_a_batch_without_samples_first_is_refused():
    model, loss, _, batches = soap_models.make("mlp", 1)
    with pytest.raises(CaptureError, match="first dimension"):
        capture(model, loss, (batches[0][0], batches[0][1][:1]))


def test_plans_that_do_not_fit_are_refused_by_name():
    graph = graph_of("transformer")
    good = data_parallel(graph, range(3))
    validate_plan(graph, good, 3)
    for configuration, words in [
        (OperatorConfiguration((1, 1, 1, 3), (0, 1, 2)), "from 1 to"),
        (OperatorConfiguration((2, 1, 1, 1), (0, 0)), "one part only"),
        (OperatorConfiguration((2, 1, 1, 1), (0, 7)), "there are 3"),
        (OperatorConfiguration((2, 1, 1, 1), (0,)), "one each"),
        (OperatorConfiguration((2, 1), (0, 1)), "for an output of shape"),
        (OperatorConfiguration((99, 1, 1, 1), (0,)), "from 1 to"),
    ]:
        with pytest.raises(PlanError, match=f"blocks.0.query .*{words}"):
            validate_plan(graph, {**good, "blocks.0.query": configuration}, 3)
    whole = {**good, "blocks.0.norm": OperatorConfiguration((1, 1, 2), (0, 1))}
    with pytest.raises(PlanError, match=r"blocks.0.norm .*cannot be split"):
        validate_plan(graph, whole, 3)
    with pytest.raises(PlanError, match="nobody"):
        validate_plan(graph, {**good, "nobody": configuration}, 3)


def test_choices_are_legal_and_start_undivided():
    graph = graph_of("conv")
    for operator in graph.planned:
        found = choices(operator, 4)
        assert found[0] == (1,) * len(operator.shape)
        assert len(set(found)) == len(found)
        for degrees in found:
            devices = tuple(range(int(torch.tensor([1, *degrees]).prod())))
            plan = {
                **data_parallel(graph, [0]),
                operator.name: OperatorConfiguration(degrees, devices),
            }
            validate_plan(graph, plan, 4)
    assert (3, 1) not in choices(graph.by_name["classify"], 4, even=True)
    assert choices(graph.by_name["classify"], 4, roles=frozenset()) == [(1, 1)]


def test_signatures_tell_sizes_apart_and_names_not():
    graph = graph_of("transformer")
    query, key = graph.by_name["blocks.0.query"], graph.by_name["blocks.0.key"]
    half = ((0, 6), *query.whole[1:])
    other = ((6, 12), *query.whole[1:])
    assert signature(query, half) == signature(query, other) != signature(query, query.whole)
    assert signature(query, half) != signature(key, half)  # one has a bias
    assert hash(signature(query, half)) is not None


class StrangeTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x)
        for _ in range(2):
            y = torch.linalg.inv(y @ y.t() + 1.0)
        return y


def test_shares_are_of_the_time_where_it_was_measured_and_each_line_is_named_once():
    graph = of_module(StrangeTwice(), 6).graph
    counted = coverage(graph)
    assert len(counted.missing) == 2
    times = {o.name: 1.0 for o in graph.planned}
    times.update({o.name: 4.0 * len(times) for o in counted.missing})
    found = coverage(graph, times)
    rest = len(times) - 2
    assert found.share == pytest.approx(rest / (rest + 8 * len(times)))
    assert "of the measured forward time" in found.line()
    refusal = found.refusal(0.5)
    assert refusal.count("(aten.linalg_inv") == 1
    assert f"and 1 more of it, {1 - found.share:.1%}" in refusal
