import sys
import types

import pytest
import torch

from perfsearch.instrument.deepspeed import Engines
from perfsearch.instrument.optimizers import Losses, Optimizers


@pytest.fixture
def make():
    made = []

    def optimizers(choice=None):
        made.append(Optimizers({"optimizer_implementation": choice}))
        return made[-1]

    yield optimizers
    for one in made:
        one.undo()


def step(optimizer, parameter):
    optimizer.zero_grad()
    (parameter**2).sum().backward()
    optimizer.step()


def test_only_the_leading_optimizer_counts(make):
    optimizers, steps = make(), []
    optimizers.after_step = lambda: steps.append(1)
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = torch.optim.SGD([first], lr=0.1), torch.optim.Adam([second])
    for _ in range(3):
        step(one, first)
        step(other, second)
    assert len(steps) == 3 and optimizers.leader is one


def test_the_first_step_begins_whoever_leads_later(make):
    optimizers, told = make(), []
    optimizers.before_step = lambda: told.append("begins")
    optimizers.after_step = lambda: told.append("ends")
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = torch.optim.SGD([first], lr=0.1), torch.optim.Adam([second])
    for _ in range(2):
        step(one, first)
        step(other, second)
    assert told == ["begins", "ends"] * 2


def test_an_implementation_is_in_force_from_the_first_step(make):
    optimizers = make("foreach")
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    step(optimizer, parameter)
    assert optimizers.values() == {"optimizer_implementation": "foreach"}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["foreach"] is True


def test_what_a_class_lacks_is_told_and_left_alone(make):
    optimizers = make("fused")
    parameter = torch.nn.Parameter(torch.ones(3))
    step(torch.optim.Adamax([parameter]), parameter)
    assert "Adamax has no fused" in optimizers.ignored["optimizer_implementation"]


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([torch.optim.AdamW], ["default", "foreach", "fused"]),
        ([torch.optim.AdamW, torch.optim.Adamax], ["default", "foreach"]),
        ([torch.optim.LBFGS], ["default"]),
        ([], None),
    ],
)
def test_implementations_are_those_of_every_optimizer_that_steps(make, kinds, names):
    optimizers, parameter = make(), torch.nn.Parameter(torch.ones(3))
    idle = torch.optim.SparseAdam([parameter])
    for kind in kinds:
        optimizer = kind([parameter])
        optimizer.step(lambda: (parameter**2).sum())
    assert idle in optimizers.live
    assert optimizers.implementations() == names


def test_changing_in_the_middle_trains_on_and_back_to_the_scripts_own(make):
    optimizers = make()
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    changing, same = (torch.optim.AdamW([p], foreach=False) for p in parameters)
    for choice in (None, "fused", "foreach", None):
        optimizers.change({"optimizer_implementation": choice})
        same.param_groups[0].update(foreach=False, fused=None)
        for optimizer, parameter in zip((changing, same), parameters, strict=True):
            step(optimizer, parameter)
    assert torch.allclose(*parameters)
    assert changing.param_groups[0]["foreach"] is False
    assert changing.state[parameters[0]]["step"].item() == 4


@pytest.fixture
def losses():
    made = Losses()
    yield made
    made.undo()


def test_the_loss_of_a_step_is_the_sum_of_its_backward_passes(losses):
    marks = []
    losses.mark = marks.append
    weight = torch.nn.Parameter(torch.ones(1))
    for factor in (1.0, 2.0):
        (weight * factor).sum().backward()
    torch.autograd.backward([(weight * 4).sum()])
    assert losses.take() == 7.0
    assert losses.take() is None
    assert marks == ["forward", "backward"] * 3


def test_gradients_that_a_script_asks_for_by_hand_are_a_backward_pass(losses):
    """Not those that are differentiated again, as a penalty on gradients is."""
    marks = []
    losses.mark = marks.append
    weight = torch.nn.Parameter(torch.ones(1))
    (slope,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    assert losses.take() is None and not marks
    loss = (weight * 3).sum() + slope.sum()
    (gradient,) = torch.autograd.grad(outputs=loss, inputs=[weight])
    assert (gradient.item(), losses.take(), marks) == (5.0, 5.0, ["forward", "backward"])


def test_gradients_that_the_compiler_traces_are_no_backward_pass(losses):
    marks = []
    losses.mark = marks.append
    net = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager")
    loss = net(torch.ones(2, 4)).square().mean()
    assert losses.take() is None and not marks
    loss.backward()
    assert (losses.take(), marks) == (loss.item(), ["forward", "backward"])


def test_what_a_backward_pass_waits_for_is_told_apart(alone):
    made, marks = Losses(lambda: True), []
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))

    def average(state, bucket):
        marks.append("summed")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    net.register_comm_hook(None, average)
    made.mark = marks.append
    try:
        loss = net(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        leaf = torch.ones(1, requires_grad=True)
        leaf.backward(torch.ones(1))
    finally:
        made.undo()
    step = ["forward", "summed", "backward", "comm_exposed"]
    assert marks == [*step, "forward", "backward", "comm_exposed", "forward", "backward"]


def test_roots_are_given_on_whatever_they_come_in(losses):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    torch.autograd.backward((w * 2).sum() for w in weights)
    edge = torch.autograd.graph.get_gradient_edge((weights[0] * 3).sum())
    torch.autograd.backward(edge, torch.ones(()))
    assert [w.grad.item() for w in weights] == [5.0, 2.0]
    assert losses.take() == 4.0


def test_a_pass_inside_a_pass_is_part_of_it(losses):
    from torch.utils.checkpoint import checkpoint

    marks = []
    losses.mark = marks.append
    weight = torch.nn.Parameter(torch.ones(1))
    checkpoint(lambda w: (w * 2).sum(), weight, use_reentrant=True).backward()
    assert marks == ["forward", "backward"]
    assert losses.take() == 2.0


def test_a_scaled_loss_counts_as_it_was(losses):
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((weight * 3).sum()).backward()
    assert losses.take() == 3.0 and weight.grad.item() == 3072.0


def test_a_root_that_is_no_loss_is_none(losses):
    weight = torch.nn.Parameter(torch.ones(2))
    (weight * 2).backward(torch.ones(2))
    assert losses.take() is None


def test_a_step_of_deepspeeds_engine_is_one_step(make, monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers, counted = make(), []
    optimizers.after_step = lambda: counted.append(1)

    class Engine:
        def _take_model_step(self):
            for parameter, optimizer in zip(parameters, self.optimizers, strict=True):
                step(optimizer, parameter)

    engine = types.ModuleType("deepspeed.runtime.engine")
    engine.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    engines = Engines(optimizers)
    Engine.optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
    assert not engines.seen
    for _ in range(3):
        Engine()._take_model_step()
    assert engines.seen and len(counted) == 3
