"""What each step of a scored window spends the host's time on."""

from __future__ import annotations

import gc
import io
import threading
import time

import pytest
import torch

from perfsearch.instrument.parts import Parts
from perfsearch.metrics.slow_steps import Cause

NAP_S = 0.05


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(torch, "save", torch.save)  # put back after the test
    found = Parts()
    yield found
    found.end()


def nap():
    time.sleep(NAP_S)


def test_every_moment_belongs_to_one_part(parts):
    parts.begin()
    nap()
    parts.called(Cause.LOADING, nap)
    parts.passed(Cause.OWN)
    nap()
    parts.passed(Cause.BACKWARD)
    parts.end_step()
    (step,) = parts.steps
    assert set(step) - {Cause.COLLECTING} == {Cause.LOADING, Cause.OWN, Cause.BACKWARD}
    assert all(step[cause] >= NAP_S for cause in (Cause.LOADING, Cause.OWN, Cause.BACKWARD))
    assert step[Cause.OWN] < step[Cause.OWN] + step[Cause.LOADING]


def test_saving_and_collecting_garbage_are_told_apart(parts):
    class Slow(io.BytesIO):
        def write(self, data):
            nap()
            return super().write(data)

    parts.begin()
    torch.save({"a": torch.ones(3)}, Slow())
    gc.collect()
    parts.passed(Cause.OWN)
    parts.end_step()
    (step,) = parts.steps
    assert step[Cause.SAVING] >= NAP_S and step[Cause.COLLECTING] > 0
    assert step[Cause.OWN] >= 0


def test_collecting_while_saving_is_taken_out_once(parts):
    class Collecting(io.BytesIO):
        def write(self, data):
            nap()
            gc.collect()
            return super().write(data)

    begin = time.perf_counter()
    parts.begin()
    torch.save({"a": torch.ones(3)}, Collecting())
    parts.passed(Cause.OWN)
    whole_s = time.perf_counter() - begin
    parts.end_step()
    (step,) = parts.steps
    assert step[Cause.SAVING] >= NAP_S and step[Cause.COLLECTING] > 0
    assert step[Cause.OWN] >= 0 and sum(step.values()) <= whole_s + 1e-9


def test_compiling_is_told_apart(parts):
    handler = pytest.importorskip("torch._dynamo.callback").callback_handler
    parts.begin()
    handler.run_start_callbacks(None)
    nap()
    handler.run_end_callbacks(None)
    parts.end_step()
    assert parts.steps[0][Cause.COMPILING] >= NAP_S


def test_nothing_is_told_outside_of_a_window_or_by_other_threads(parts):
    assert parts.called(Cause.LOADING, lambda: 7) == 7
    parts.begin()
    other = threading.Thread(target=lambda: parts.called(Cause.LOADING, nap))
    other.start()
    other.join()
    parts.end_step()
    assert Cause.LOADING not in parts.steps[0]
    parts.end()
    parts.passed(Cause.OWN)
    assert parts._collect not in gc.callbacks and len(parts.steps) == 1
    parts.begin()
    assert parts.steps == []
