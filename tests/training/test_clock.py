import subprocess
import sys

import pytest
import torch

from perfsearch.training import clock
from perfsearch.training.clock import (
    FirstLosses,
    RankWindow,
    State,
    StepTimer,
    StepWindow,
    WindowRule,
)


class FakeClock(clock.HostClock):
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
    assert clock.is_steady(seconds) is steady


@pytest.mark.parametrize(
    ("seconds", "step", "steps"), [(1.0, 0.1, 10), (1.0, 10.0, 4), (1.0, 0.001, 60), (1.0, 0.0, 60)]
)
def test_steps_to_fill(seconds, step, steps):
    assert clock.steps_to_fill(seconds, step, (4, 60)) == steps


def test_peak_resident_set_can_be_reset():
    cpu = torch.device("cpu")
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    clock.reset_peaks(cpu)
    high = clock.read_peaks(cpu)["peak_allocated_gib"]
    del block
    clock.reset_peaks(cpu)
    low = clock.read_peaks(cpu)["peak_allocated_gib"]
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
    assert clock.detailed_each(step, count) == each
    assert [p for p in range(count) if clock.is_detailed(p, each)] == places


@pytest.mark.parametrize("every", [2, 5, 10])
def test_what_happens_in_every_so_many_steps_is_met_as_often(every):
    detailed = [place for place in range(1000) if clock.is_detailed(place, 5)]
    met = sum(place % every == 0 for place in detailed)
    assert len(detailed) == 200 and met == pytest.approx(200 / every, rel=0.15)


def warmed(rule, times):
    """A window after as many of these steps as its warm-up takes."""
    window = StepWindow(rule)
    for seconds in times:
        window.warm(seconds)
        if window.state is not State.WARM_UP:
            return window
    raise AssertionError("the warm-up has not ended")


@pytest.mark.parametrize(
    ("rule", "times", "made"),
    [
        (WindowRule(), [5.0, 0.1, 0.11, 0.1], 3),
        (WindowRule(), [5.0, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2], 8),
        (WindowRule(scored_seconds=0.1), [5.0, 0.01, 0.1, 0.2, 0.1], 4),  # steps take too long
        (WindowRule(), [0.1, 90.0, 0.1, 0.1, 0.1], 4),  # the second step compiles
        (WindowRule(warmup_steps=(5, 5)), [0.1] * 6, 5),
        (WindowRule(warmup_steps=(1, 1)), [9.0, 0.1], 1),
    ],
)
def test_the_warm_up_ends_with_steady_steps_or_as_late_as_it_may(rule, times, made):
    window = warmed(rule, times)
    assert (window.state, window.discarded_steps) == (State.SCORED, made)
    assert window.discarded_seconds == pytest.approx(sum(times[:made]))


def test_what_was_made_before_belongs_to_the_warm_up():
    assert StepWindow(WindowRule(), [1.0, 0.1]).state is State.WARM_UP
    assert StepWindow(WindowRule(), [1.0, 0.1, 0.1]).state is State.SCORED
    assert StepWindow(WindowRule(warmup_steps=(0, 0), stop_above_s=0.1)).state is State.SCORED


@pytest.mark.parametrize(
    ("times", "uneven", "count"),
    [
        ([1.0, 0.05, 0.05], False, 20),
        ([1.0, 0.05, 0.05, 0.2, 0.2], False, 5),
        ([1.0, 0.05, 0.05, 0.05, 0.2], True, 20),  # the last held a round of validation
        ([0.5, 0.5], True, 4),
    ],
)
def test_a_window_covers_its_seconds_in_steps_as_long_as_the_last_ones(times, uneven, count):
    rule = WindowRule((4, 60), 1.0, warmup_steps=(len(times), len(times)), uneven=uneven)
    assert warmed(rule, times).count == count


def test_seconds_of_compiling_are_told_apart():
    window = warmed(WindowRule((1, 1)), [0.1, 90.0, 0.1, 0.1])
    window.score([0.1])
    plain, compiled = window.result(), window.result(compiles=True)
    assert plain["discarded_seconds"] == pytest.approx(90.3) and "compile_seconds" not in plain
    assert compiled["compile_seconds"] == pytest.approx(89.9)
    assert compiled["discarded_seconds"] == pytest.approx(0.4)


def test_slow_steps_are_not_scored():
    for uneven, slow in ((False, [9.0, 0.3, 0.3]), (True, [0.1, 0.3, 0.3])):
        window = warmed(WindowRule(stop_above_s=0.2, uneven=uneven), slow)
        assert window.state is State.STOPPED
        assert window.why_stopped == "steps take 0.3 s, more than 0.2 s"
    once = warmed(WindowRule(stop_above_s=0.2), [9.0, 0.1, 0.3, 0.3])
    assert once.state is State.SCORED and not once.why_stopped


def stretches(rule, step_of, warm=(1.0, 0.1, 0.1)):
    """How many steps a window asks for, one stretch after another, of a job of such steps."""
    window = warmed(rule, warm)
    counts = []
    while window.state is State.SCORED:
        counts.append(window.count)
        begin = window.made
        window.score([step_of(place) for place in range(begin, begin + window.count)])
    return counts, window


def every(period, long, quick=0.1, begin=0):
    return lambda place: long if place % period == begin else quick


@pytest.mark.parametrize(
    ("step_of", "counts"),
    [
        (lambda place: 0.1, [10]),
        (every(4, 0.4), [10]),  # met at 0, 4 and 8
        (every(8, 2.0), [10, 8]),  # met twice, and once more where it is due
        (every(25, 2.0, begin=9), [10, 10, 10]),  # met once in three times the first stretch
        (every(11, 2.0, begin=9), [10, 10, 10, 3]),
        (lambda place: 0.1 + 0.001 * (place % 2), [10]),
    ],
)
def test_a_window_grows_until_what_recurs_was_met_three_times(step_of, counts):
    asked, window = stretches(WindowRule((10, 10)), step_of)
    assert asked == counts
    assert window.state is State.OVER and window.result() == {
        "step_seconds": [step_of(place) for place in range(sum(counts))],
        "discarded_steps": 3,
        "discarded_seconds": pytest.approx(1.2),
    }


def test_a_window_grows_neither_without_end_nor_beyond_its_time():
    rare = every(70, 2.0, begin=9)
    assert sum(stretches(WindowRule((20, 20)), rare)[0]) <= 60
    assert stretches(WindowRule((10, 10), limit_s=5.0), every(8, 2.0))[0] == [10]
    assert stretches(WindowRule((10, 10), grows=False), every(8, 2.0))[0] == [10]


def test_a_window_looks_on_for_what_recurs_seldom():
    asked, window = stretches(WindowRule((60, 60), look_steps=400), lambda place: 0.1)
    assert asked == [60, 60, 120, 160]  # never more at once than there were: a script may end
    asked, window = stretches(
        WindowRule((60, 60), look_steps=400, look_seconds=10.0), lambda place: 0.1
    )
    assert sum(asked) == 100
    quick_then_rollout = every(65, 3.0, quick=0.01, begin=64)
    asked, window = stretches(WindowRule((60, 60), look_steps=400), quick_then_rollout)
    assert sum(asked) == 400 and len(window.scored_s) == 400


def test_a_window_marks_as_many_steps_as_it_was_opened_for():
    timer = StepTimer(torch.device("cpu"))
    before = timer.clock
    assert timer.warmup_step() >= 0.0 and not before.is_open
    timer.open(3)
    assert timer.clock is not before
    assert [timer.step() for _ in range(3)] == [False, False, True]
    seconds, by_step = timer.clock.read_steps()
    assert len(seconds) == len(by_step) == 3 and timer.left == 0
    assert 0.0 <= timer.host_s <= seconds[0] + 1.0


def test_ranks_that_drive_their_window_themselves_score_it(monkeypatch):
    monkeypatch.setattr(clock, "slowest", lambda values, device: list(values))
    window = RankWindow(
        WindowRule((2, 2), warmup_steps=(3, 3), look_steps=4, grows=False), torch.device("cpu")
    )
    while window.state is State.WARM_UP:
        window.end_step()
    assert window.state is State.SCORED and not window.is_open
    while window.state is State.SCORED:
        window.open()
        while window.is_open:
            window.clock.mark("forward")
            window.end_step()
    phases_ms, evidence = window.read()
    assert set(phases_ms) == {"forward"} and {"forward_error_ms", "phases_step_ms"} == set(evidence)
    assert window.state is State.OVER and len(window.scored_s) == 4


@pytest.mark.parametrize(
    ("values", "first", "why"),
    [
        ([3.0, 2.0], [3.0, 2.0], ""),
        ([3.0, float("nan"), 2.0], [3.0, 2.0], "the loss is nan at step 2"),
        ([1.0] * 6 + [float("inf")], [1.0] * 5, "the loss is inf at the last scored step"),
        ([], [], ""),
    ],
)
def test_first_losses_and_the_last_tell_of_a_divergence(monkeypatch, values, first, why):
    monkeypatch.setattr(clock, "mean_over_ranks", lambda values: values.tolist())
    losses = FirstLosses()
    for value in values:
        losses.note(torch.tensor(value))
    assert losses.read(torch.device("cpu")) == (first, why)


def test_importing_the_protocol_leaves_torch_alone():
    code = "import sys, perfsearch.training.clock; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
