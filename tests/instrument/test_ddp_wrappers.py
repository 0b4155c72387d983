import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from perfsearch.instrument.ddp import Wrappers
from perfsearch.instrument.patching import untouched
from perfsearch.knobs import ddp
from perfsearch.knobs.base import Use


def values_of(wrapper):
    return ddp.values_of(wrapper, Use.SCRIPT)


@pytest.fixture
def wrappers():
    made = Wrappers({"bucket_cap_mb": 2.0, "gradient_as_bucket_view": True})
    yield made
    made.undo()


@pytest.mark.parametrize(
    ("own", "knobs", "made"),
    [
        ({}, {}, {}),
        ({"bucket_cap_mb": 10, "dim": 0}, {"bucket_cap_mb": None}, {"bucket_cap_mb": 10, "dim": 0}),
        ({"bucket_cap_mb": 10}, {"bucket_cap_mb": 25.0}, {}),
        ({"bucket_cap_mb_list": [1, 8]}, {"bucket_cap_mb": 50.0}, {"bucket_cap_mb": 50.0}),
        ({"bucket_cap_mb": 10}, {"first_bucket_mb": 4.0}, {"bucket_cap_mb_list": [4.0, 10.0]}),
        ({"static_graph": True}, {"static_graph": False}, {}),
        ({"find_unused_parameters": True}, {"find_unused_parameters": False}, {}),
    ],
)  # fmt: skip
def test_knobs_take_the_place_of_the_scripts_own_arguments(own, knobs, made):
    assert ddp.arguments_given(own, knobs) == made


def test_the_scripts_wrapper_gets_the_knobs_and_stays_its_own(alone, wrappers):
    model = DDP(torch.nn.Linear(4, 4), None, bucket_cap_mb=7)
    assert type(model) is DDP and isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert values_of(model)["bucket_cap_mb"] == 2.0
    assert values_of(model)["gradient_as_bucket_view"] is True
    assert wrappers.live == [model]
    with untouched():
        assert values_of(DDP(torch.nn.Linear(4, 4), bucket_cap_mb=7))["bucket_cap_mb"] == 7.0
    assert wrappers.live == [model]


@pytest.mark.parametrize(("own", "first"), [({}, 1.0), ({"bucket_cap_mb": 25}, 25.0)])
def test_the_first_bucket_is_small_only_where_no_size_is_given(alone, own, first):
    found = values_of(DDP(torch.nn.Linear(4, 4), **own))
    assert (found["bucket_cap_mb"], found["first_bucket_mb"]) == (25.0, first)


@pytest.mark.parametrize("by_flag", [True, False])
def test_backward_passes_without_reduction_are_noticed(alone, wrappers, by_flag):
    model = DDP(torch.nn.Linear(4, 4))
    wrappers.note_backward()
    assert not wrappers.accumulates
    if by_flag:  # as some scripts do in place of the context
        model.require_backward_grad_sync = False
        wrappers.note_backward()
    else:
        with model.no_sync():
            wrappers.note_backward()
    assert wrappers.accumulates


def test_wrapping_again_keeps_the_object_its_hooks_and_its_training(alone, wrappers):
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model, called = DDP(inner, bucket_cap_mb=7), []
    model.register_forward_hook(lambda *_: called.append("forward"))
    model.register_comm_hook(None, counting(called))
    data = torch.randn(4, 8)
    model(data).sum().backward()
    expected = [p.grad.clone() for p in inner.parameters()]
    wrappers.wrap_again({"bucket_cap_mb": 0.5, "static_graph": True})
    model.zero_grad()
    model(data).sum().backward()
    assert wrappers.live == [model] and model.module is inner
    assert called.count("forward") == 2 and called.count("bucket") >= 2
    assert values_of(model) == {
        "bucket_cap_mb": 0.5,
        "first_bucket_mb": 0.5,
        "gradient_as_bucket_view": False,
        "static_graph": True,
        "find_unused_parameters": False,
    }
    for parameter, grad in zip(inner.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
    wrappers.wrap_again({})
    assert values_of(model)["bucket_cap_mb"] == 7.0  # the script's own again


def counting(called):
    def hook(state, bucket):
        called.append("bucket")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook
