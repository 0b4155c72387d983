"""Rounds of agreement over a store, with threads for ranks."""

import threading

import pytest
import torch.distributed as dist

from perfsearch.online.store import END, RUN, Channel, Instruction, Report


@pytest.fixture
def channels():
    store = dist.HashStore()
    return [Channel(store, [0, 1], rank, 0, limit_s=0.5) for rank in range(2)]


def test_every_report_comes_in_and_one_answer_goes_out(channels):
    lead, other = channels
    assert lead.leads and not other.leads
    for number in range(4):
        lead.report(Report(number))
        other.report(Report(number, failure="no"))
        reports = lead.gather()
        assert [r.failure for r in reports] == ["", "no"]
        asked = Instruction(RUN, discard=number)
        assert lead.decide(asked) == asked == other.await_decision()


def test_a_rank_that_does_not_come_ends_the_wait(channels):
    channels[0].report(Report(1))
    assert channels[0].gather() is None


def test_who_gives_up_first_decides_for_all(channels):
    """The deciding rank is late: the others have ended tuning, and so does it."""
    lead, other = channels
    other.report(Report(1))
    found = []
    thread = threading.Thread(target=lambda: found.append(other.await_decision()))
    thread.start()
    thread.join(10)
    assert found[0].kind == END
    assert found[0].goes_back
    lead.report(Report(1))
    assert lead.decide(Instruction(RUN, score=5)) == found[0]


def test_old_rounds_are_deleted():
    store = dist.HashStore()
    lead = Channel(store, [0], 0, 0, limit_s=0.5)
    counts = []
    for _ in range(8):
        lead.report(Report(1))
        assert lead.gather() is not None
        lead.decide(Instruction(RUN))
        counts.append(store.num_keys())
    assert counts[-1] == counts[3]
