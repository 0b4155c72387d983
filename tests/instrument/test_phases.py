"""Which phase each moment of a scored step belongs to, on a clock that only calls move."""

import threading

import pytest

from perfsearch.instrument.phases import Phases
from perfsearch.training.clock import HostClock


class Stage:
    """A window whose time passes only where it is told to."""

    def __init__(self):
        self.time = 0.0
        clock = HostClock()
        clock.now = lambda: self.time
        clock.mark("start")
        self._clock, self.phases = clock, Phases(clock)

    def work(self, seconds):
        self.time += seconds
        return self

    def mark(self, *names):
        for name in names:
            self.phases.mark(name)
        return self

    def call(self, phase, seconds, inside=None):
        assert self.phases.enter(phase)
        self.work(seconds)
        if inside is not None:
            inside()
        self.phases.leave()
        return self

    def end(self):
        self.phases.mark("optimizer")
        self._clock.mark("step")
        return self

    def read(self):
        seconds, by_step = self.phases.read()
        assert sum(seconds) == pytest.approx(self.time)
        for spent, phases in zip(seconds, by_step, strict=True):
            assert sum(phases.values()) == pytest.approx(spent)
        return by_step


@pytest.fixture
def stage():
    return Stage()


def test_a_call_splits_the_phase_that_it_lies_in(stage):
    stage.work(1).call("step_lr_schedulers", 2).work(4).mark("other")
    stage.work(8).mark("dataloader_next")
    stage.work(16).call("from_device", 32).work(64).mark("forward")
    stage.work(128).call("callbacks", 256).work(512).mark("backward")
    stage.work(1024).call("from_device", 2048).work(4096).mark("other")
    stage.work(8192).end()
    assert stage.read() == [
        {
            "other": 1 + 4 + 1024 + 4096,
            "step_lr_schedulers": 2,
            "dataloader_next": 8,
            "forward": 16 + 64,
            "from_device": 32 + 2048,
            "backward": 128 + 512,
            "callbacks": 256,
            "optimizer": 8192,
        }
    ]


def test_a_call_inside_a_call_is_taken_out_of_it(stage):
    def logs():
        stage.call("from_device", 1).work(2).call("step_lr_schedulers", 4).work(8)

    stage.call("callbacks", 16, logs).mark("other").end()
    (phases,) = stage.read()
    spent = {name: ms for name, ms in phases.items() if ms}
    assert spent == {"callbacks": 16 + 2 + 8, "from_device": 1, "step_lr_schedulers": 4}


def test_validation_in_a_callback_keeps_its_batches_and_passes_apart(stage):
    def validates():
        stage.work(1).mark("other").work(2).mark("dataloader_next").work(4)
        stage.mark("forward").work(8).mark("backward").work(16)

    stage.work(32).call("callbacks", 64, validates).work(128).mark("forward").end()
    (phases,) = stage.read()
    spent = {name: ms for name, ms in phases.items() if ms}
    assert spent == {
        "forward": 32 + 128,  # what goes on after the callback
        "callbacks": 64 + 1 + 4 + 16,
        "dataloader_next": 2,
        "backward": 8,
    }


def test_a_step_may_end_inside_a_call(stage):
    def steps():
        stage.work(1).mark("other").work(2).end()
        stage.work(4)

    stage.call("callbacks", 8, steps).work(16).mark("other").end()
    first, second = stage.read()
    assert first == {"callbacks": 9, "optimizer": 2, "other": 0}
    assert {n: s for n, s in second.items() if s} == {"callbacks": 4, "other": 16}


def test_what_is_never_named_is_other(stage):
    stage.call("callbacks", 1)
    stage.phases.enter("callbacks")
    stage.work(2).end()
    (phases,) = stage.read()
    assert phases == {"other": 0, "callbacks": 1, "optimizer": 2}


def test_other_threads_are_not_timed(stage):
    seen = []

    def elsewhere():
        stage.mark("dataloader_next")
        seen.append(stage.phases.enter("callbacks"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    stage.work(1).mark("other").end()
    assert seen == [False] and stage.phases.in_threads
    assert stage.read() == [{"other": 1, "optimizer": 0}]


def test_the_backward_pass_may_end_in_a_thread_of_its_own(stage):
    def computed():
        stage.work(2).mark("backward")

    stage.work(1).mark("forward")
    thread = threading.Thread(target=computed)
    thread.start()
    thread.join()
    stage.work(4).mark("comm_exposed").end()
    assert not stage.phases.in_threads
    assert stage.read() == [{"forward": 1, "backward": 2, "comm_exposed": 4, "optimizer": 0}]
