"""What a traced program does not show is found, and refused with the line."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.capture.trace import CaptureError

BATCH = (torch.zeros(6, 4), torch.zeros(6, 3))


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self, middle=lambda model, x: x):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.middle = middle

    def forward(self, x):
        return self.leave(self.middle(self, self.enter(x)))


def squared(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def of(middle):
    return capture(Model(middle), squared, BATCH)


def hooked(model, x):
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def averaged(model, x):
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
    return x - model.mean


def counted(model, x):
    model.calls += 1
    return x if model.calls % 2 else torch.tanh(x)


def counted_in_a_buffer(model, x):
    model.count += 1
    return x / model.count


def unaware(model, x):
    with torch.inference_mode():
        return torch.tanh(x)


def drawn(model, x):
    return x if random.random() < 0.5 else torch.tanh(x)


def drawn_by_numpy(model, x):
    return x if np.random.rand() < 0.5 else torch.tanh(x)


def written_out(model, x):
    made = torch.empty_like(x)
    torch.tanh(x.detach(), out=made)
    return x * made


def chosen(model, x):
    return x[x > 0].mean() * x


def branching(model, x):
    return x if bool(x.sum() > 0) else torch.tanh(x)


def widened(model, x):
    y = x.half()
    y += torch.ones(4)
    return y.float()


def cast_inside(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.tanh(x)


def mapped(model, x):
    return torch.vmap(torch.tanh)(x)


def differentiated(model, x):
    y = torch.tanh(x)
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("middle", "words", "line"),
    [
        (lambda m, x: Through.apply(x), "Through is an autograd.Function", True),
        (lambda m, x: checkpoint(torch.tanh, x, use_reentrant=True), "use_reentrant=False", True),
        (hooked, "hook on a gradient", True),
        (averaged, "buffer mean of Model", True),
        (counted, "changes calls of Model in each step", False),
        (counted_in_a_buffer, "reads a buffer that the step changes", True),
        (unaware, "use no_grad", True),
        (drawn, "Python's random", False),
        (drawn_by_numpy, r"numpy\.random", False),
        (written_out, "writes into its out", True),
        (widened, "writes into a tensor of float16", True),
        (chosen, "whose shape depends on values", True),
        (branching, "depends on a number that is read from a tensor", True),
        (cast_inside, "autocast inside the model would be lost", True),
        (mapped, "torch.vmap and torch.func", True),
        (differentiated, "by autograd.grad within the step", False),
        (lambda m, x: x / x.abs().max().item(), "takes a number from item", True),
        (lambda m, x: x * m.enter.weight.data.sum(), "use detach", False),
        (lambda m, x: torch.complex(x, x).abs(), "complex numbers", True),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused(middle, words, line):
    before = torch.autograd.Function.apply, nn.Module.__setattr__, torch.Tensor.register_hook
    with pytest.raises(CaptureError, match=words) as error:
        of(middle)
    assert ("test_trace.py:" in str(error.value)) is line
    after = torch.autograd.Function.apply, nn.Module.__setattr__, torch.Tensor.register_hook
    assert [getattr(a, "__func__", a) for a in after] == [getattr(b, "__func__", b) for b in before]


def picks(x):
    return torch.multinomial(x.exp(), 1)


def test_the_line_that_is_named_is_the_innermost_one():
    line = picks.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"draws random numbers.*test_trace.py:{line}$"):
        of(lambda model, x: x + picks(x))


def test_what_cannot_be_captured_prints_no_graph(capfd):
    with pytest.raises(CaptureError):
        of(branching)
    assert "def forward" not in "".join(capfd.readouterr())


def test_a_users_directory_may_be_called_torch(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    path = tmp_path / "torch" / "some_layers.py"
    path.write_text("def middle(model, x):\n    model.mean = x.detach().mean(0)\n    return x\n")
    monkeypatch.syspath_prepend(path.parent)
    import some_layers

    with pytest.raises(CaptureError, match=r"buffer mean.*torch/some_layers.py:2"):
        of(some_layers.middle)


def test_hooks_that_stand_already_are_refused():
    model = Model()
    model.enter.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(CaptureError, match=r"parameter enter\.weight has a hook"):
        capture(model, squared, BATCH)
    model = Model()
    model.leave.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="module leave has a backward hook"):
        capture(model, squared, BATCH)


def cached(model, x):
    if model.calls < x.shape[1]:
        model.calls = x.shape[1]
    return x


def unchecked(model, x):
    return checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize("middle", [cached, unchecked])
def test_what_settles_in_the_first_step_is_captured(middle):
    assert [o.name for o in of(middle).graph.planned][:1] == ["enter"]


def without_gradient(model, x):
    with torch.no_grad():
        return torch.tanh(x)


@pytest.mark.parametrize("middle", [without_gradient, lambda m, x: x.detach()])
def test_parameters_without_a_way_to_the_loss_have_no_gradient(middle):
    trained = {p.key: p.trained for o in of(middle).graph.operators for p in o.parameters}
    assert trained == {
        "enter.weight": False,
        "enter.bias": False,
        "leave.weight": True,
        "leave.bias": True,
    }


def test_a_layer_that_reads_a_number_is_named_by_its_line():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)

        def forward(self, x):
            return self.norm(self.enter(x))

    with pytest.raises(CaptureError, match=r"read from a tensor .*batchnorm\.py:\d+"):
        capture(Model(), lambda model, x: model(x).square().mean(), torch.zeros(4, 4))


def windows(model, x):
    """As of shifted windows: a mask that is made by writing into parts of it."""
    regions = x.new_zeros(4)
    for number, place in enumerate((slice(0, 2), slice(2, -1), slice(-1, None))):
        regions[place] = number
    first = x + regions
    regions.mul_(2.0)
    return first * (regions + 1.0)


def test_a_constant_that_is_made_by_writing_is_computed_once():
    captured = of(windows)
    made = [value for name, value in captured.constants.items() if name.startswith("written")]
    assert [value.tolist() for value in made] == [[0.0, 0.0, 1.0, 2.0], [1.0, 1.0, 3.0, 5.0]]


def written_from_samples(model, x):
    made = torch.zeros(6, 4)
    made[:, :2] = x[:, :2]
    return made + made.mul_(2.0)


def test_what_samples_are_written_into_is_no_constant():
    with pytest.raises(CaptureError, match="writes into a tensor that is"):
        of(written_from_samples)
