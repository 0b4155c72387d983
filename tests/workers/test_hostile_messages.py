"""What may come over a socket from processes that are not as they should be."""

import json
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from support.hostile import DEEP, PLAIN, any_text, at_most

from perfsearch.pipeline.session_socket import SessionSocket
from perfsearch.workers import messages
from perfsearch.workers.messages import Channel, ChannelClosed


def received(raw):
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=lambda: (theirs.sendall(raw), theirs.close()), daemon=True)
    sender.start()
    channel = Channel(ours)
    found = []
    try:
        while True:
            found.append(channel.receive(10.0))
    except ChannelClosed:
        return found
    finally:
        channel.close()


@settings(max_examples=150, deadline=None)
@given(some.one_of(some.binary(max_size=60), PLAIN.map(lambda v: json.dumps(v).encode() + b"\n")))
@example(DEEP + b"\n")
@example(b"\n")
@example(b'{"event": "hello"}')
def test_a_message_is_one_or_the_channel_is_closed(raw):
    assert all(isinstance(message, dict) for message in received(raw))


@settings(max_examples=50, deadline=None)
@given(some.lists(some.dictionaries(any_text(max_size=8), some.integers()), max_size=5))
def test_whole_messages_arrive_in_order(sent):
    raw = b"".join(json.dumps(one).encode() + b"\n" for one in sent)
    assert received(raw) == sent
    assert received(raw + b'{"torn": ') == sent


@settings(max_examples=100, deadline=None)
@given(some.one_of(some.binary(max_size=60), PLAIN.map(lambda v: json.dumps(v).encode() + b"\n")))
@example(DEEP[:60_000] + b"\n")
@example(b"x" * 200_000)
@example(b'{"knobs": ')
def test_a_request_to_a_session_is_taken_or_its_caller_sent_away(raw):
    """The next one is served, whatever came before it."""
    good, taken = {"knobs": {"bucket_cap_mb": 8}}, []
    with tempfile.TemporaryDirectory(dir="/tmp") as run_dir, SessionSocket(Path(run_dir)) as asked:
        for line in (raw, json.dumps(good).encode() + b"\n"):
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(str(asked.path))
            threading.Thread(target=say, args=(caller, line)).start()
        while not taken or taken[-1] != good:
            served = asked.wait(30.0)
            assert served is not None
            taken.append(served.request)
            served.answer({})
    assert all(isinstance(request, dict) for request in taken)


def say(caller, line):
    with caller, suppress(OSError):
        caller.sendall(line)


def test_a_message_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr(messages, "MOST_OF_MESSAGE", 2**20)
    ours, theirs = socket.socketpair()

    def flood():
        with suppress(OSError):
            while True:
                theirs.sendall(b"x" * 2**16)

    sender = threading.Thread(target=flood)
    sender.start()
    channel = Channel(ours)
    with at_most(8), pytest.raises(ChannelClosed, match="a message of more than 1 MiB"):
        channel.receive(60.0)
    channel.close()
    sender.join(30)
    assert not sender.is_alive()
