"""The memory of a DeepSpeed job, and what its ranks leave behind."""

import os

import pytest

from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.runners.deepspeed import trial
from perfsearch.runners.deepspeed.memory import Memory, Rest

ADAM = {"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}


def test_what_rests_follows_from_the_stage():
    gib = 2**30
    rest = Rest(parameters=gib, trainable=gib, half=True, states=8)
    assert [rest.gib(stage, 4) for stage in range(4)] == [16, 7, 5.5, 4]
    frozen = Rest(parameters=gib, trainable=gib / 2, half=False, states=8)
    assert frozen.gib(0, 4) == 4 + 2 + 4


def seen(micro, stage, peak=None, status=Status.OK):
    measured = None
    if peak is not None:
        facts = {"parameters": 2.0**30, "trainable_parameters": 2.0**30}
        measured = Measurement([1.0], 1, peak_allocated_gib=peak, bottleneck_evidence=facts)
    configuration = {"micro_batch": micro, "zero_stage": stage}
    return Trial(micro, configuration, Purpose.SEARCH, status, measured)


def test_peaks_are_predicted_from_trials_and_what_does_not_fit_is_refused():
    memory = Memory(ADAM, 4, {}, capacity_gib=12.0, headroom=0.05, parameters=None)
    assert memory.refusal({"micro_batch": 1, "zero_stage": 0}, []) is None
    trials = [seen(1, 3, 5.0), seen(2, 3, 5.5)]
    assert memory.predict({"micro_batch": 8, "zero_stage": 3}, trials).peak_gib == pytest.approx(
        8.5
    )
    assert memory.predict({"micro_batch": 8, "zero_stage": 1}, trials).peak_gib == pytest.approx(
        11.5
    )
    assert "16.0 GiB rest" in memory.refusal({"micro_batch": 1, "zero_stage": 0}, trials)
    trials.append(seen(16, 3, status=Status.OOM))
    assert "micro_batch=16" in memory.refusal({"micro_batch": 32, "zero_stage": 3}, trials)
    assert memory.refusal({"micro_batch": 8, "zero_stage": 3}, trials) is None


def test_too_little_headroom_is_said():
    memory = Memory(ADAM, 4, {}, capacity_gib=10.0, headroom=0.05, parameters=None)
    assert "memory_headroom" in memory.lacks_headroom(Measurement([1.0], 1, peak_allocated_gib=9.6))
    tried = Measurement([1.0], 1, peak_allocated_gib=9.0)
    assert memory.lacks_headroom(tried) == ""
    tried.bottleneck_evidence["allocator_retries"] = 2.0
    assert "2 times" in memory.lacks_headroom(tried)


def test_locks_of_ended_ranks_are_broken_and_older_ones_are_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    locks = [tmp_path / "py312" / name / "lock" for name in ("ours", "older")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(locks[1], (1000, 1000))
    assert trial._break_build_locks(begin=2000)
    assert not trial._break_build_locks(begin=2000)
    assert [lock.exists() for lock in locks] == [False, True]
