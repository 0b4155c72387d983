import pytest
import torch

from perfsearch.workers.profile import SyncWatch


class Ticks:
    """A clock that moves one second at each reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def watch(**changes):
    return SyncWatch(lambda tensor: True, Ticks(), **changes)


def test_each_way_to_a_value_counts_once_with_its_line():
    tensor = torch.ones(2)
    with watch() as seen:
        tensor[0].item()
        float(tensor[1])
        bool(tensor[0])
        tensor.tolist()
        tensor.to("cpu")
        tensor.to(device=torch.device("cpu"))
    assert sum(seen.calls.values()) == 6
    assert seen.seconds == 6.0
    assert len(seen.calls) == 6
    assert all(site.rpartition(":")[0] == __file__ for site in seen.calls)


def test_a_call_inside_another_is_a_part_of_it():
    with watch() as seen:
        str(torch.ones(3))  # formatting asks for many values
        before = sum(seen.calls.values())
        torch.ones(()).cpu().item()
    assert sum(seen.calls.values()) == before + 2


def test_values_that_are_here_already_do_not_count():
    with SyncWatch() as seen:
        torch.ones(()).item()
        torch.ones(2).to(torch.float64)
        torch.ones(2).to("cpu")
    assert not seen.calls


def test_everything_is_as_before_even_after_an_error():
    before = {name: getattr(torch.Tensor, name) for name in ("item", "to", "__bool__", "cpu")}
    own = {name for name in before if name in vars(torch.Tensor)}
    synchronize = torch.cuda.synchronize

    def fail():
        with watch():
            assert torch.Tensor.item is not before["item"]
            torch.ones(2).item()

    with pytest.raises(RuntimeError):
        fail()
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert {name for name in before if name in vars(torch.Tensor)} == own
    assert torch.cuda.synchronize is synchronize
