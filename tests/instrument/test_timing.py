"""What is in place while a window is timed, and that nothing of it is left behind."""

from types import SimpleNamespace
from unittest.mock import Mock

import torch

from perfsearch.instrument.rank import Timing

CPU, REMOTE = torch.device("cpu"), torch.device("meta")


def a_script(is_compiled=False):
    """Instruments that only hold what they are told."""
    return SimpleNamespace(
        parts=Mock(),
        calls=SimpleNamespace(phases=None),
        optimizers=SimpleNamespace(phases=None),
        loaders=SimpleNamespace(mark=None),
        losses=SimpleNamespace(mark=None),
        is_compiled=lambda: is_compiled,
    )


def told(script):
    holders = (script.loaders.mark, script.losses.mark)
    return [script.calls.phases, script.optimizers.phases, *holders]


def test_every_instrument_marks_inside_a_window_and_none_after_it():
    script, items = a_script(), torch.Tensor.item
    timing = Timing(script)
    timing.begin(REMOTE, count=3)
    assert all(told(script))
    assert torch.Tensor.__dict__["item"] is not items
    timing.end()
    assert told(script) == [None] * 4
    assert timing.transfers is None
    assert torch.Tensor.item is items


def test_steps_of_a_window_are_told_apart():
    timing = Timing(a_script())
    timing.before_step()  # before any window
    timing.after_step()
    timing.begin(CPU, count=3)
    phases = timing.phases
    for _ in range(3):
        timing.before_step()
        timing.after_step()
    timing.end()
    seconds, by_step = phases.read()
    assert [set(step) for step in by_step] == [{"other", "optimizer"}] * 3
    for whole, parts in zip(seconds, by_step, strict=True):
        assert 0 < sum(parts.values()) <= whole


def test_instruments_know_of_no_window_in_steps_without_detail():
    script = a_script()
    timing = Timing(script)
    timing.begin(REMOTE, count=6, each=3)
    timing.timer.clock.now = lambda: 0.0  # there is no such device
    phases, seen = timing.phases, []
    for _ in range(6):
        seen.append((all(told(script)), timing.transfers.watching))
        timing.before_step()
        timing.after_step()
    timing.end()
    assert seen == [(place in (1, 3),) * 2 for place in range(6)]
    seconds, by_step = phases.read()
    assert len(seconds) == 6
    assert [bool(step) for step in by_step] == [place in (1, 3) for place in range(6)]


def test_methods_of_tensors_stay_on_the_host_and_beside_compiled_code():
    for script, device in ((a_script(), CPU), (a_script(is_compiled=True), REMOTE)):
        timing = Timing(script)
        timing.begin(device, count=3)
        assert timing.transfers is None
        timing.end()
