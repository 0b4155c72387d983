"""Public cases about timing steps, with a clock that only steps move."""

from dataclasses import replace

import pytest
import torch

from perfsearch.training import clock
from perfsearch.workers import trial
from perfsearch.workers.messages import TrialRequest

REQUEST = TrialRequest(
    serial=0, recipe="training.ddp", configuration={}, samples_per_step=8, scored_seconds=1.0
)
CPU = torch.device("cpu")


class Steps:
    """A training step that takes the seconds it is told, on a fake clock."""

    compiles = False
    lost = ""

    def __init__(self, monkeypatch, seconds, queued=False):
        self.now = self.device_done = 0.0
        self._seconds = iter(seconds)
        self._queued = queued
        self.clock = clock.HostClock()
        self.device = CPU
        self.in_force_of_feed = {}
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock, "slowest", lambda values, device: list(values))
        monkeypatch.setattr(clock, "mean_over_ranks", lambda values: values.tolist())
        monkeypatch.setattr(clock, "synchronize", self.synchronize)

    def run(self, feed, mark):
        took = next(self._seconds)
        self.device_done = max(self.device_done, self.now) + took
        if self._queued:
            self.now += 1e-5  # the host only queues the work
        else:
            self.synchronize(CPU)
        return torch.tensor(1.0)

    def synchronize(self, device):
        self.now = max(self.now, self.device_done)

    def in_force(self):
        return {}

    def evidence(self):
        return {}


class Feed:
    def __init__(self, steps):
        self.device, self.clock, self.in_force = CPU, steps.clock, {}


def test_slow_first_steps_are_not_in_the_score(monkeypatch):
    """pytorch/pytorch#93634: compiling, or NCCL's start, takes ten times a step."""
    steps = Steps(monkeypatch, [1.0, *[0.1] * 200])
    result = trial._measured(steps, Feed(steps), REQUEST, 0.0)
    seconds = result.agreed["step_seconds"]
    assert seconds == pytest.approx([0.1] * len(seconds), rel=0.02)
    assert result.agreed["discarded_seconds"] >= 1.0


def test_queued_work_is_waited_for(monkeypatch):
    """TristanBilot/mlx-benchmark#21, pytorch/pytorch#177765: no time without a synchronisation."""
    steps = Steps(monkeypatch, [0.1] * 400, queued=True)

    class Events(clock.Clock):
        """As events on a stream: each holds the time at which the device gets there."""

        def now(self):
            return steps.device_done

        def between(self, earlier, later):
            assert steps.now >= later, "read before the device was through"
            return later - earlier

    monkeypatch.setattr(clock, "make_clock", lambda device: Events())
    result = trial._measured(steps, Feed(steps), replace(REQUEST, scored_seconds=0.5), 0.0)
    seconds = result.agreed["step_seconds"]
    assert seconds == pytest.approx([0.1] * len(seconds), rel=0.05)


def test_an_error_late_in_a_trial_leaves_no_measurement(monkeypatch):
    """vllm-project/vllm#21410: what was timed before is not handed on."""

    def times():
        yield from [0.1] * 6
        raise RuntimeError("CUDA out of memory")

    steps = Steps(monkeypatch, times())
    with pytest.raises(RuntimeError, match="out of memory"):
        trial._measured(steps, Feed(steps), REQUEST, 0.0)
