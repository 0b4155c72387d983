import pytest
import torch

from perfsearch.workers import measure, settling


class FakeClock(measure.HostClock):
    def __init__(self, times):
        super().__init__()
        self._times = iter(times)

    def now(self):
        return next(self._times)


def test_phases_sum_to_the_steps():
    clock = FakeClock([0.0, 1.0, 3.0, 3.5, 4.0, 4.5, 6.0, 7.0, 7.25, 8.0])
    for phase in ("start", "dataloader_next", "forward", "backward", "optimizer", "step"):
        clock.mark(phase)
    for phase in ("dataloader_next", "forward", "optimizer", "step"):
        clock.mark(phase)
    steps, phases = clock.read()
    assert steps == [4.5, 3.5]
    assert phases == pytest.approx(
        {"dataloader_next": 1.25, "forward": 1.5, "backward": 0.25, "optimizer": 0.375}
    )


def test_a_phase_that_repeats_within_a_step_adds_up():
    clock = FakeClock([0.0, 1.0, 2.0, 4.0, 4.0])
    for phase in ("start", "forward", "backward", "forward", "step"):
        clock.mark(phase)
    assert clock.read() == ([4.0], {"forward": 3.0, "backward": 1.0})


@pytest.mark.parametrize(
    ("seconds", "steady"),
    [
        ([1.0, 1.0], False),
        ([5.0, 1.0, 1.1], True),
        ([5.0, 1.0, 1.3], False),
        ([1.0, 1.0, 1.0, 9.0], False),
        ([1.0, 1.0, 1.0, 9.0, 9.5], True),
    ],
)
def test_is_steady(seconds, steady):
    assert measure.is_steady(seconds) is steady


@pytest.mark.parametrize(
    ("seconds", "step", "steps"), [(1.0, 0.1, 10), (1.0, 10.0, 4), (1.0, 0.001, 60), (1.0, 0.0, 60)]
)
def test_steps_to_fill(seconds, step, steps):
    assert measure.steps_to_fill(seconds, step, (4, 60)) == steps


def test_peak_resident_set_can_be_reset():
    cpu = torch.device("cpu")
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    measure.reset_peaks(cpu)
    high = measure.read_peaks(cpu)["peak_allocated_gib"]
    del block
    measure.reset_peaks(cpu)
    low = measure.read_peaks(cpu)["peak_allocated_gib"]
    assert high - low > 0.15


@pytest.mark.parametrize(
    ("step", "count", "each", "places"),
    [
        (0.5, 8, 1, list(range(8))),
        (0.1, 10, 1, list(range(10))),
        (0.023, 43, 5, [2, 5, 13, 16, 24, 27, 31, 39, 42]),
        (0.001, 60, 7, [3, 7, 19, 23, 34, 39, 43, 54, 59]),
        (0.0, 4, 1, [0, 1, 2, 3]),
    ],
)
def test_phases_are_timed_in_as_many_steps_as_cost_little(step, count, each, places):
    assert settling.detailed_each(step, count) == each
    assert [p for p in range(count) if settling.is_detailed(p, each)] == places


@pytest.mark.parametrize("every", [2, 5, 10])
def test_what_happens_in_every_so_many_steps_is_met_as_often(every):
    detailed = [place for place in range(1000) if settling.is_detailed(place, 5)]
    met = sum(place % every == 0 for place in detailed)
    assert len(detailed) == 200 and met == pytest.approx(200 / every, rel=0.15)
