"""torch's store in a script's processes: it listens on the loopback, a store as any other."""

import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from perfsearch.instrument import store
from perfsearch.instrument.patching import wrap

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _wrapped():
    undo = wrap(dist.TCPStore, "__init__", store._made)
    yield
    undo()


def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_the_loopback_listens_there_alone(host, use_libuv):
    before = listening()
    made = dist.TCPStore(host, 0, 1, True, TIMEOUT, multi_tenant=True, use_libuv=use_libuv)
    (address,) = listening() - before
    assert address == ("127.0.0.1", made.port)
    made.set("key", "value")
    other = dist.TCPStore(host, made.port, 1, False, TIMEOUT)
    assert other.get("key") == b"value"


def test_a_second_store_of_a_port_shares_the_first():
    before = listening()
    options = {"host_name": "localhost", "is_master": True, "timeout": TIMEOUT}
    first = dist.TCPStore(port=0, world_size=1, multi_tenant=True, **options)
    second = dist.TCPStore(port=first.port, world_size=1, multi_tenant=True, **options)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert len(listening() - before) == 1


def test_a_port_that_somebody_else_has_is_torchs_own_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises((RuntimeError, dist.DistNetworkError)):
            dist.TCPStore("localhost", taken.getsockname()[1], 1, True, timedelta(seconds=2))


def test_a_store_for_other_hosts_is_left_as_it_is(monkeypatch):
    """Ranks of other nodes reach it by a name that is not the loopback's."""
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]
    monkeypatch.setattr(store.socket, "getaddrinfo", lambda *_, **__: here)
    before = listening()
    made = dist.TCPStore("localhost", 0, 1, True, TIMEOUT)
    (address,) = listening() - before
    assert address[0] in ("::", "0.0.0.0")
    assert address[1] == made.port
