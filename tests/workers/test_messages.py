import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from perfsearch.workers.messages import (
    Channel,
    ChannelClosed,
    Listener,
    short_temporary_directory,
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


@pytest.mark.parametrize("length", [75, 76, 240])
def test_a_temporary_directory_is_short_enough_for_workers(length, short_tmp):
    """At the very length from which no socket of ``multiprocessing`` can be in it any more, too.

    riga/law#184
    """
    directory = short_tmp / ("x" * (length - len(str(short_tmp)) - 1))
    directory.mkdir()
    environment = {**os.environ, "TMPDIR": str(directory)}
    own = short_tmp / "own"
    own.mkdir()
    more = short_temporary_directory(environment, own)
    assert bool(more) == (length > 75)
    words = [sys.executable, "-c", LISTENS]
    assert (subprocess.run(words, env=environment, check=False).returncode == 0) == (not more)
    assert subprocess.run(words, env={**environment, **more}, check=False).returncode == 0
    if more:
        (Path(more["TMPDIR"]) / "kept").touch()
        shutil.rmtree(own)
        assert (directory / "kept").exists()
