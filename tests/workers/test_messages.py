import os
import subprocess
import sys
import threading

import pytest

from perfsearch.workers.messages import (
    Channel,
    ChannelClosed,
    Listener,
    caution_of_temporary_directory,
)


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


LISTENS = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX').close()"


@pytest.mark.parametrize("length", [75, 76])
def test_a_temporary_directory_too_long_for_workers_is_told(length, short_tmp, monkeypatch):
    """At the very length from which no socket of ``multiprocessing`` can be in it any more."""
    directory = short_tmp / ("x" * (length - len(str(short_tmp)) - 1))
    directory.mkdir()
    assert len(str(directory)) == length
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    told = caution_of_temporary_directory()
    done = subprocess.run([sys.executable, "-c", LISTENS], env=dict(os.environ), check=False)
    assert (done.returncode == 0) == (not told) == (length == 75)
