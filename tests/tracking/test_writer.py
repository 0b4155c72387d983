import threading
import time

from perfsearch.tracking import writer
from perfsearch.tracking.writer import Item, Writer


class DeadServer:
    """As a mirror whose server was killed in the middle of a call."""

    def __init__(self):
        self.called, self.over, self.reachable = threading.Event(), threading.Event(), True

    def check_reachable(self):
        if not self.reachable:
            raise ConnectionError

    def apply(self, record, trial):
        self.called.set()
        self.over.wait(60)


def test_the_end_does_not_wait_for_a_call_to_a_server_that_is_gone(monkeypatch):
    """radixark/miles#2571: MLflow tries a call again for minutes, by itself."""
    monkeypatch.setattr(writer, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(writer, "CLOSING_RETRY_S", 0.1)
    mirror = DeadServer()
    one = Writer(mirror, lambda: None, lambda why: None)
    one.start()
    one.put(Item({"kind": "summary"}))
    assert mirror.called.wait(10)
    mirror.reachable = False
    begin = time.monotonic()
    assert one.close(timeout_s=50) is False
    assert time.monotonic() - begin < 25
    mirror.over.set()


def test_the_end_waits_for_a_server_that_is_slow(monkeypatch):
    monkeypatch.setattr(writer, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(writer, "CLOSING_RETRY_S", 0.1)
    mirror = DeadServer()
    one = Writer(mirror, lambda: None, lambda why: None)
    one.start()
    one.put(Item({"kind": "summary"}))
    threading.Timer(0.8, mirror.over.set).start()
    assert one.close(timeout_s=50) is True
