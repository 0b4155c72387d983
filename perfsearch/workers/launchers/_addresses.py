"""Addresses and network interfaces of this node, by which others reach it."""

from __future__ import annotations

import os
import socket

import psutil

from perfsearch.core.errors import BadInputError


def listen_at(endpoint: str | None, interface: str | None) -> socket.socket:
    """A socket that listens at one address of this node.

    Args:
        endpoint: ``HOST:PORT``; ``None``: any port.
        interface: whose address is taken where no endpoint is given.

    Raises:
        BadInputError: there is no such address here, or the port is in use.

    """
    host, _, port = (endpoint or "").rpartition(":")
    if endpoint and (not host or not port.isdigit()):
        raise BadInputError(f"launcher.endpoint={endpoint}: give it as HOST:PORT.")
    if not host:
        host = address_of(interface) if interface else own_address()
    try:
        found = socket.getaddrinfo(host, int(port or 0), type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0], backlog=1024)
    except OSError as error:
        here = ", ".join(sorted({a for _, a in _addresses()}))
        raise BadInputError(
            f"launcher.endpoint={endpoint or host}: {error.strerror or error}. It is an address "
            "and a free port of this node, at which the others reach it. Addresses here: "
            f"{here}."
        ) from error


def own_address() -> str:
    """The address that this node's name stands for; another one where that is loopback's."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    others = [one for _, one in _addresses() if not one.startswith(("127.", "::1", "fe80:"))]
    return next(iter(others), named) if named.startswith("127.") else named


def address_of(interface: str) -> str:
    """The first address of a network interface.

    Raises:
        BadInputError: there is no such interface, or it has no address.

    """
    found = [address for name, address in _addresses() if name == interface]
    if not found:
        names = ", ".join(sorted({name for name, _ in _addresses()}))
        raise BadInputError(
            f"launcher.interface={interface}: it has no address here. Interfaces here: {names}."
        )
    return found[0]


def interface_with(address: str) -> str:
    """The network interface that has an address; empty where none has."""
    return next((name for name, one in _addresses() if one == address), "")


def interface_variables(interface: str, named: bool) -> dict[str, str]:
    """What has ranks use an interface; NCCL looks for its own unless the user named one."""
    if not interface:
        return {}
    found = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": interface}
    return found | ({"NCCL_SOCKET_IFNAME": interface} if named else {})


def _addresses() -> list[tuple[str, str]]:
    """Interfaces and their IP addresses, those of version 4 first."""
    found = [
        (one.family, name, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [(name, address) for _, name, address in sorted(found)]
