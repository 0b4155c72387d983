import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perfsearch.instrument.models import Models
from perfsearch.instrument.optimizers import Optimizers
from perfsearch.knobs import model as knob
from perfsearch.knobs.model import graphs_compiled

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def convolving():
    layers = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 1))


class Training(nn.Module):
    """As frameworks have it: the module outside is never called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class Block(nn.Module):
    """As a layer of a transformer: it has layers of its own."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Stage(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


@pytest.fixture
def optimizers():
    made = Optimizers({})
    yield made
    made.undo()


@pytest.fixture
def eager():
    """Compiling that only notes what it compiles, as if torch had."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def step(model, optimizer, inputs=IMAGES):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.usefixtures("eager")
def test_weights_and_what_optimizers_keep_of_them_change_their_layout_and_back(optimizers):
    model, twin = convolving(), convolving()
    twin.load_state_dict(model.state_dict())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    models = Models({"channels_last": True}, optimizers)
    step(model, adam)
    assert models.values() == {} and models.images is None
    parameters = list(model.parameters())
    assert models.find() and models.images
    assert models.values() == {"channels_last": True, "compile_mode": "none"}
    assert model[0](IMAGES).is_contiguous(memory_format=torch.channels_last)
    step(model, adam)
    state = adam.state[model[0].weight]["exp_avg"]
    assert state.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    models.change({})
    assert model[0].weight.is_contiguous() and state.is_contiguous()
    assert models.values()["channels_last"] is False
    step(model, adam)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        step(twin, plain)
    for changed, same in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(changed, same, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("eager")
def test_a_layout_of_the_scripts_own_is_todays(optimizers):
    model = convolving().to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    step(model, sgd)
    models = Models({}, optimizers)
    assert not models.find() and models.values()["channels_last"] is True
    models.change({"channels_last": False})
    assert models.values()["channels_last"] is False
    models.change({})
    assert models.values()["channels_last"] is True


@pytest.mark.parametrize(
    ("kind", "sizes", "inputs", "images"),
    [
        (nn.Conv3d, (2, 4, 2), torch.ones(1, 2, 4, 4, 4), True),
        (nn.ConvTranspose2d, (3, 4, 2), IMAGES, True),
        (nn.Conv1d, (3, 4, 2), torch.ones(1, 3, 4), False),
        (nn.Linear, (3, 4), torch.ones(1, 3), False),
    ],
)
@pytest.mark.usefixtures("eager")
def test_images_are_flat_or_solid(optimizers, kind, sizes, inputs, images):
    layer = kind(*sizes)  # here, as other tests freeze what Python's collector knows of before
    sgd = torch.optim.SGD(layer.parameters(), lr=1e-2)
    step(layer, sgd, inputs)
    models = Models({"channels_last": True}, optimizers)
    assert models.find() == models.images == models.values()["channels_last"] == images


def test_the_outermost_of_what_is_trained_is_found(alone):
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    outer = Training(DistributedDataParallel(inner))
    other = nn.Linear(2, 2)
    found = knob.trained_modules([*inner[1].parameters(), other.weight])
    assert {id(m) for m in found} == {id(outer), id(other)}
    assert knob.trained_modules([nn.Parameter(torch.ones(1))]) == []


def test_what_is_called_to_train_is_compiled_and_nothing_inside_of_it(alone):
    used, aside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    whole = Training(nn.ModuleList([DistributedDataParallel(used), aside]))
    compiled, give_up = knob.compile_when_called([whole], None)
    with torch.no_grad():
        whole.inner[0](torch.ones(1, 2))
    assert not compiled
    whole.inner[0](torch.ones(1, 2)).sum().backward()
    assert compiled == [(used, [used])] and used._compiled_call_impl is not None
    assert not any(m._forward_pre_hooks for m in used.modules())
    give_up()
    aside(torch.ones(1, 2))
    assert compiled == [(used, [used])] and not aside._forward_pre_hooks
    assert knob.scope_of(compiled) == "model"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Sequential(Block(), Block(8), nn.Linear(4, 1)), 2),
        (nn.ModuleList([Stage(Block(), Block()), Stage(*(Block() for _ in range(3)))]), 5),
        (nn.Sequential(Block(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), 0),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))), 0),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 3), 3),
        (Stage(Stage(Block(), Block()), Stage(Block(), Block()), Stage(Block())), 3),
    ],
)
def test_blocks_are_of_the_class_of_which_most_stand_side_by_side(model, found):
    blocks = knob.repeated_blocks(model)
    assert len(blocks) == found and len({type(block) for block in blocks}) == bool(found)


def test_blocks_are_compiled_in_place_of_the_whole_and_all_of_a_model_without_any(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, mode=None: call)
    model, plain = nn.Sequential(Block(), Block()), nn.Linear(4, 4)
    compiled, _ = knob.compile_when_called([model, plain], None, True)
    for module in (model, plain):
        module(torch.ones(1, 4))
    assert compiled == [(model, [model[0], model[1]]), (plain, [plain])]
    assert knob.scope_of(compiled) == "blocks" and model._compiled_call_impl is None
    assert model[0]._compiled_call_impl is not None
    knob.undo(model)
    assert not knob.compiles_itself(model)


def test_a_model_that_is_compiled_already_is_not_compiled_again():
    asked = {"compile_mode": "default", "compile_scope": "blocks"}
    for model in (torch.compile(nn.Linear(2, 2)), nn.Sequential(Block(), Block())):
        if isinstance(model, nn.Sequential):
            model[1].compile()
        made, values, lost = knob.apply(asked, model)
        assert made is model and "is compiled already" in lost
        assert values == {"compile_mode": "none", "compile_scope": "model"}


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_model_is_compiled_and_shapes_that_compile_anew_are_told(optimizers):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    models = Models({"compile_mode": "default"}, optimizers)
    step(model, sgd, torch.ones(2, 4))
    models.find()
    step(model, sgd, torch.ones(2, 4))
    assert models.values()["compile_mode"] == "none"  # torch compiles in the second call
    models.end_search()
    step(model, sgd, torch.ones(2, 4))
    assert models.values()["compile_mode"] == "default" and models.compiles
    for size, lost in ((2, False), (5, True)):
        models.begin_window()
        step(model, sgd, torch.ones(size, 4))
        models.end_window()
        assert ("compile_mode" in models.ignored) == lost
    assert "compile_mode=default compiled 1 graphs anew" in models.ignored["compile_mode"]


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_blocks_that_are_alike_are_compiled_once_and_do_the_same(optimizers):
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), Block())
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    models = Models({"compile_mode": "default", "compile_scope": "blocks"}, optimizers)
    for number in range(3):
        step(model, sgd, torch.ones(2, 4))
        if not number:
            models.find()
            assert models.blocks == 3 and "compile_scope" not in models.values()
    assert models.values()["compile_scope"] == "blocks"
    assert models.values()["compile_mode"] == "default" and graphs_compiled() == 1
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for _ in range(3):
        step(twin, plain, torch.ones(2, 4))
    for changed, same in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(changed, same)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_script_that_compiles_itself_is_left_alone(optimizers):
    model = torch.compile(convolving(), backend="aot_eager")
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    step(model, sgd)
    assert graphs_compiled()
    models = Models({"compile_mode": "default", "channels_last": True}, optimizers)
    assert not models.find() and not models.compiles
    assert "compile_mode" not in models.values()
    assert models.ignored["compile_mode"].endswith("the script compiles its model itself")
