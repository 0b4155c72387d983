"""Schedulers, callbacks and copies inside of a scored step, on a clock that only they move."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from torch.optim import lr_scheduler

from perfsearch.instrument.optimizers import Optimizers
from perfsearch.instrument.phases import Calls, Phases, Transfers
from perfsearch.training.clock import HostClock

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")


class Window(HostClock):
    """A clock that stands still unless something sleeps on it."""

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.mark("start")

    def now(self):
        return self.time

    def sleep(self, ms):
        self.time += ms / 1e3


@pytest.fixture
def clock():
    return Window()


@pytest.fixture
def calls():
    made = Calls()
    yield made
    made.undo()


def spent_ms(phases, clock):
    """Of one step: what took any time."""
    phases.mark("other")
    clock.mark("step")
    (step,) = phases.read()[1]
    return {name: s * 1e3 for name, s in step.items() if s}


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def slow(clock, ms):
    """A schedule that sleeps while it is asked for its rate."""

    def rate(step):
        clock.sleep(ms)
        return 1.0

    return rate


def test_a_schedulers_step_is_timed_and_one_inside_another_once(calls, clock):
    first = lr_scheduler.LambdaLR(optimizer(), slow(clock, 15))
    stepped = optimizer()
    parts = [lr_scheduler.LambdaLR(stepped, slow(clock, 7)) for _ in range(2)]
    chained = lr_scheduler.SequentialLR(stepped, parts, [2])
    clock.time = 0.0
    calls.phases = Phases(clock)
    clock.sleep(1)
    first.step()
    clock.sleep(2)
    chained.step()
    assert spent_ms(calls.phases, clock) == pytest.approx({"step_lr_schedulers": 22, "other": 3})


def test_a_step_of_the_scripts_own_is_timed(calls, clock):
    class Own(lr_scheduler.LRScheduler):
        def get_lr(self):
            return [1.0]

        def step(self, epoch=None):
            super().step()
            clock.sleep(15)

    scheduler = Own(optimizer())
    clock.time = 0.0
    calls.phases = Phases(clock)
    scheduler.step()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer())
    plateau.step(1.0)
    assert spent_ms(calls.phases, clock) == pytest.approx({"step_lr_schedulers": 15})


def test_outside_of_a_window_nothing_is_marked(calls, clock):
    scheduler = lr_scheduler.LambdaLR(optimizer(), slow(clock, 15))
    scheduler.step()
    assert calls.phases is None and labels(clock) == ["start"]


def test_a_window_that_ends_inside_a_call_hurts_nobody(calls, clock):
    def ends(step):
        if calls.phases is not None:
            clock.sleep(1)
            seen.append(spent_ms(calls.phases, clock))
            calls.phases = None
        return 1.0

    seen = []
    scheduler = lr_scheduler.LambdaLR(optimizer(), ends)
    calls.phases = Phases(clock)
    scheduler.step()
    assert seen == [pytest.approx({"step_lr_schedulers": 1})]


def test_callbacks_of_frameworks_are_timed_once_they_are_imported(clock, monkeypatch):
    """Scheduler inside of a callback, and a framework that has another name for it."""
    trainer = types.ModuleType("transformers.trainer_callback")
    hooks = types.ModuleType("lightning.pytorch.trainer.call")
    unlike = types.ModuleType("pytorch_lightning.trainer.call")
    scheduler = lr_scheduler.LambdaLR(optimizer(), slow(clock, 4))

    class CallbackHandler:
        def call_event(self, event):
            clock.sleep(1)
            scheduler.step()
            return event

    trainer.CallbackHandler = CallbackHandler
    hooks._call_callback_hooks = lambda trainer, name: clock.sleep(2)
    for module in (trainer, hooks, unlike):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    calls = Calls()
    clock.time = 0.0
    calls.phases = Phases(clock)
    try:
        assert CallbackHandler().call_event("on_step_end") == "on_step_end"
        hooks._call_callback_hooks(None, "on_train_batch_end")
    finally:
        calls.undo()
    assert spent_ms(calls.phases, clock) == pytest.approx({"callbacks": 3, "step_lr_schedulers": 4})


@pytest.mark.parametrize(
    ("package", "module", "path"),
    [
        ("transformers", "transformers.trainer_callback", "CallbackHandler.call_event"),
        ("transformers", "transformers.trainer_pt_utils", "nested_gather"),
        ("lightning", "lightning.pytorch.trainer.call", "_call_callback_hooks"),
        (
            "lightning",
            "lightning.pytorch.trainer.connectors.logger_connector.result",
            "_ResultCollection.metrics",
        ),
        ("accelerate", "accelerate.accelerator", "Accelerator.gather_for_metrics"),
    ],
)
def test_frameworks_have_what_is_wrapped(package, module, path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


def test_an_optimizer_beside_the_leading_one_is_timed_as_one(clock):
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            clock.sleep(6)
            return super().step(closure)

    optimizers = Optimizers({})
    try:
        weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        one, other = Slow([weights[0]], lr=0.1), Slow([weights[1]], lr=0.1)
        for weight in weights:
            weight.grad = torch.ones(1)
        one.step()  # leads from now on
        clock.time = 0.0
        optimizers.phases = Phases(clock)
        clock.sleep(1)
        other.step()
        assert spent_ms(optimizers.phases, clock) == pytest.approx({"other": 1, "optimizer": 6})
    finally:
        optimizers.undo()


@pytest.fixture
def transfers(clock):
    """The device ``meta`` stands for the accelerator."""
    made = Transfers(Phases(clock), clock=lambda: clock.now())
    before = {n: getattr(torch.Tensor, n) for n in ("to", "cuda", "item", "__bool__")}
    made.watch()
    yield made
    made.undo()
    assert {n: getattr(torch.Tensor, n) for n in before} == before
    assert all(type(getattr(torch.Tensor, n)) is type(o) for n, o in before.items())


def labels(clock):
    return [name for name, _ in clock._points if not name.startswith("?")]


def test_copies_to_the_device_are_told_from_what_stays(transfers, clock):
    tensor = torch.ones(2)
    for stays in (torch.float64, "cpu", tensor):
        tensor.to(stays)
    tensor.to(dtype=torch.float64)
    tensor.to(memory_format=torch.contiguous_format)
    assert labels(clock) == ["start"]
    remote = tensor.to("meta")
    tensor.to(torch.device("meta"), torch.float64, non_blocking=True)
    tensor.to(device="meta")
    tensor.to(remote)
    remote.to("meta")
    torch.nn.Linear(1, 1).to("meta")
    assert labels(clock) == ["start", *6 * ["to_device"]]
    assert transfers.seconds == 0 and not transfers.calls


def test_copies_in_another_stream_take_none_of_the_steps_time(transfers, clock, monkeypatch):
    monkeypatch.setattr("perfsearch.instrument.phases._stream", lambda: "beside")
    assert torch.ones(2).to("meta").device.type == "meta"
    assert labels(clock) == ["start"]


def test_waiting_for_a_value_is_timed_with_its_line(clock):
    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func == torch.Tensor.item:
                clock.sleep(5)
            return super().__torch_function__(func, types, args, kwargs)

    tensor = torch.ones(1).as_subclass(Slow)
    phases = Phases(clock)
    transfers = Transfers(phases, lambda device: True, lambda: clock.now())
    transfers.watch()
    try:
        clock.sleep(1)
        tensor.item()
        float(torch.ones(1))
    finally:
        transfers.undo()
    assert transfers.seconds == pytest.approx(0.005) and sum(transfers.calls.values()) == 2
    assert all(site.rpartition(":")[0] == __file__ for site in transfers.calls)
    assert spent_ms(phases, clock) == pytest.approx({"other": 1, "from_device": 5})


def test_values_on_the_host_are_read_as_ever(transfers, clock):
    tensor = torch.ones(1)
    assert type(tensor.item) is type(tensor.detach)  # nothing of ours in between
    assert (tensor.item(), float(tensor), tensor.tolist()) == (1.0, 1.0, [1.0])
    assert labels(clock) == ["start"]
    with pytest.raises(RuntimeError, match="meta"):
        tensor.to("meta").item()
    assert labels(clock) == ["start", "to_device", "from_device"]
    assert sum(transfers.calls.values()) == 1


def test_subclasses_find_the_methods_that_they_know():
    """As torchvision's do, which keep their class in those few methods that they list."""
    known = {torch.Tensor.to: "moved"}

    class Kept(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in known:
                return known[func]
            return super().__torch_function__(func, types, args, kwargs)

    tensor = torch.ones(1).as_subclass(Kept)
    transfers = Transfers(Phases(Window()))
    transfers.watch()
    try:
        assert torch.Tensor.to in known
        assert tensor.to("meta") == "moved"
    finally:
        transfers.undo()
