import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from perfsearch.core.files import remove_temporary_directory
from perfsearch.workers.messages import (
    LONGEST_SOCKET,
    Channel,
    ChannelClosed,
    Listener,
    socket_directory,
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


SERVES = """
import multiprocessing, sys, time
from multiprocessing.connection import Listener
from perfsearch.workers.messages import keep_worker_sockets

def serve(queue):
    listener = Listener(family="AF_UNIX")
    queue.put(listener.address)
    time.sleep(600)

if __name__ == "__main__":
    keep_worker_sockets(sys.argv[1])
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        context.Process(target=serve, args=(queue,), daemon=True).start()
        print(queue.get(), flush=True)
    time.sleep(600)
"""


def test_sockets_of_workers_go_with_the_directory_of_their_group(short_tmp, monkeypatch):
    """Killed processes left directories behind (benchmarks/soak.py, ddp 688180719); a long
    ``TMPDIR`` has none that sockets fit into (riga/law#184).
    """
    long = short_tmp / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    (short_tmp / "serves.py").write_text(SERVES)
    base = short_tmp / ("y" * (LONGEST_SOCKET - 38 - len(str(short_tmp)) - 1))
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    own = socket_directory()
    assert own.parent == base, "the longest in which a socket has room"
    words = [sys.executable, str(short_tmp / "serves.py"), str(own)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        family = []
        try:
            assert process.stdout is not None
            served = [Path(process.stdout.readline().strip()) for _ in range(2)]
            assert all(path.is_socket() for path in served)
            assert [path.parent for path in served] == [own, own]
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
            for member in family:
                member.kill()
    psutil.wait_procs(family, timeout=10)
    assert list(long.iterdir()) == []
    remove_temporary_directory(own)
    assert not own.exists()


def test_the_directory_of_a_group_is_elsewhere_where_no_socket_would_fit(short_tmp, monkeypatch):
    base = short_tmp / ("y" * (LONGEST_SOCKET - 37 - len(str(short_tmp)) - 1))
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    own = socket_directory()
    assert own.parent == Path("/tmp")
    remove_temporary_directory(own)
