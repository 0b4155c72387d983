"""torch's store of a script on one node: it listens where only this host can reach it.

``TCPStore`` binds every interface, and whoever reaches it may read and write what ranks tell each
other. It takes a socket that listens already (``master_listen_fd``), which is what is given to it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from perfsearch.instrument.patching import wrap

_BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel takes fewer where it allows fewer."""

_NAMES = ("host_name", "port", "world_size", "is_master")
"""What ``TCPStore`` takes first, in its order."""


def listen_on_loopback() -> None:
    """Have stores whose host is this one's loopback listen there alone, from now on."""
    if dist.is_available() and hasattr(dist, "TCPStore"):
        wrap(dist.TCPStore, "__init__", _made)


def _made(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the store, on a socket of ours where it would listen and its host is the loopback."""
    asked = {**dict(zip(_NAMES, args[1:], strict=False)), **kwargs}
    is_master, host, port = asked.get("is_master"), asked.get("host_name"), asked.get("port")
    if not is_master or asked.get("master_listen_fd") is not None or not isinstance(port, int):
        return original(*args, **kwargs)
    listening = _listening(str(host), port)
    if listening is None:
        return original(*args, **kwargs)
    if "port" in kwargs:
        kwargs = {**kwargs, "port": listening.getsockname()[1]}  # 0 lets the kernel choose
    else:
        args = (*args[:2], listening.getsockname()[1], *args[3:])
    return original(*args, **kwargs, master_listen_fd=listening.detach())


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the loopback.

    ``None`` where the host is another, or the port is in use, as by a store of this process that
    is shared.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = {(family, address[0]) for family, *_, address in found}
        if not all(ipaddress.ip_address(address).is_loopback for _, address in addresses):
            return None
        family, address = min(addresses)  # IPv4 first: clients try both
        made = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made
