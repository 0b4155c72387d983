import threading

import pytest

from perfsearch.workers.messages import Channel, ChannelClosed, Listener


@pytest.fixture
def ends(tmp_path):
    listener = Listener(tmp_path / "s")
    far = Channel.connect(tmp_path / "s")
    near = listener.accept(5, lambda: True)
    yield near, far
    for end in (near, far, listener):
        end.close()


def test_messages_keep_their_bounds_and_order(ends):
    near, far = ends
    big = {"text": "x" * 300_000}
    sender = threading.Thread(target=lambda: [far.send(m) for m in ({"n": 1}, big, {"n": 2})])
    sender.start()
    assert [near.receive(5) for _ in range(3)] == [{"n": 1}, big, {"n": 2}]
    sender.join()


def test_waiting_is_bounded_and_loses_nothing(ends):
    near, far = ends
    with pytest.raises(TimeoutError):
        near.receive(0.05)
    far.send({"n": 1})
    assert near.receive(5) == {"n": 1}


def test_the_other_end_being_gone_is_seen(ends):
    near, far = ends
    far.close()
    with pytest.raises(ChannelClosed):
        near.receive(5)


def test_nobody_comes(tmp_path):
    listener = Listener(tmp_path / "s")
    with pytest.raises(ChannelClosed):
        listener.accept(5, lambda: False)
    with pytest.raises(TimeoutError):
        listener.accept(0.2, lambda: True)
    listener.close()
