"""Connections between nodes: who is let in, and what is carried."""

import socket
import threading

import pytest

from perfsearch.workers.launchers import _gate
from perfsearch.workers.launchers._gate import Doors, Gate, StrangerError, secret_from

SECRET = "0123456789abcdef"


class Behind:
    """A gate, with what stands behind it."""

    def __init__(self, directory):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.turned_away, self.admitted = [], []
        self.place = directory / "place.sock"
        self.came = threading.Event()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(self.place))
        server.listen()
        self.server = server
        self.gate = Gate(
            self.listener, SECRET, self._admit, self._open_place, self.turned_away.append
        )

    def _admit(self, connection):
        self.admitted.append(connection)
        self.came.set()

    def _open_place(self, group, place):
        if (group, place) != ("group", "place"):
            raise LookupError(place)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.place))
        return connection


@pytest.fixture
def behind(short_tmp):
    made = Behind(short_tmp)
    yield made
    made.gate.close()
    made.server.close()


def test_who_knows_the_secret_reaches_the_controller(behind):
    doors = Doors(behind.address, SECRET)
    connection = doors.call()
    assert behind.came.wait(10)
    behind.admitted[0].sendall(b"welcome")
    assert connection.recv(7) == b"welcome"
    connection.close()
    doors.close()


def test_who_does_not_is_turned_away_and_learns_nothing(behind):
    doors = Doors(behind.address, "another secret than that")
    with pytest.raises(StrangerError, match="it takes another secret"):
        doors.call()
    assert behind.turned_away == ["127.0.0.1"] and not behind.admitted
    doors.close()
    with socket.create_connection(behind.address) as stranger:
        stranger.settimeout(10)
        greeting = stranger.recv(1024)
        stranger.sendall(b"x" * 64)
        left = b"".join(iter(lambda: stranger.recv(1024), b""))
    assert not left and SECRET.encode() not in greeting


def test_who_says_nothing_is_hung_up_on_and_keeps_nobody_waiting(behind, monkeypatch):
    monkeypatch.setattr(_gate, "HANDSHAKE_S", 0.5)
    with socket.create_connection(behind.address) as silent:
        doors = Doors(behind.address, SECRET)
        doors.call().close()
        silent.settimeout(10)
        assert b"".join(iter(lambda: silent.recv(1024), b"")).startswith(b"perfsearch")
    doors.close()


def test_one_that_stands_at_the_gates_address_and_knows_nothing_is_not_believed(short_tmp):
    """A node shows no more than a proof that is good for this one connection."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        doors = Doors(impostor.getsockname(), SECRET)

        def answer():
            connection, _ = impostor.accept()
            connection.sendall(_gate._GREETING + b"n" * 32)
            connection.recv(1024)
            connection.sendall(b"p" * 32)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(StrangerError, match="does not know the secret"):
            doors.call()
        doors.close()


def test_a_port_and_a_socket_of_another_node_lead_to_a_place_behind_the_gate(behind, short_tmp):
    doors = Doors(behind.address, SECRET)
    port = doors.open_port("group", "place")
    with socket.create_connection(("127.0.0.1", port)) as rank:
        there, _ = behind.server.accept()
        rank.sendall(b"a" * 300_000)
        rank.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: there.recv(65_536), b""))
        assert received == b"a" * 300_000
        there.sendall(b"answer")  # one way may end before the other
        assert rank.recv(6) == b"answer"
        there.close()
    doors.open_socket(short_tmp / "door.sock", "group", "place")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(str(short_tmp / "door.sock"))
        there, _ = behind.server.accept()
        there.sendall(b"hello")
        assert rank.recv(5) == b"hello"
        there.close()
    nowhere = doors.open_port("a group that is over", "place")
    with socket.create_connection(("127.0.0.1", nowhere)) as rank:
        rank.settimeout(10)
        assert rank.recv(1) == b""
    doors.close()


def test_a_secret_is_the_users_or_drawn():
    assert secret_from({"PERFSEARCH_SECRET": SECRET}) == SECRET
    assert secret_from({}) != secret_from({})
    with pytest.raises(ValueError, match="PERFSEARCH_SECRET has 5 characters"):
        secret_from({"PERFSEARCH_SECRET": "short"})
