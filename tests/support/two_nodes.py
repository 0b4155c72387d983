"""Two nodes that are network namespaces of this host, each with an address of its own."""

import itertools
import os
import subprocess
import uuid

_NUMBERS = itertools.count(os.getpid() % 200)


def why_not() -> str:
    """Why this host can have none; empty where it can."""
    name = f"pst-{uuid.uuid4().hex[:6]}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        return f"network namespaces need the command ip: {error}"
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class TwoNodes:
    """A pair of namespaces joined by one cable; ``close`` removes them.

    Attributes:
        addresses: of the first and the second.
        interfaces: names of the ends of the cable.

    """

    def __init__(self):
        number, mark = next(_NUMBERS) % 250, uuid.uuid4().hex[:6]
        self.names = [f"pst-{mark}-{end}" for end in "ab"]
        self.interfaces = [f"v{mark}{end}" for end in "ab"]
        self.addresses = [f"10.77.{number}.{place}" for place in (1, 2)]
        one, other = self.interfaces
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", one, "type", "veth", "peer", "name", other)
        for name, interface, address in zip(
            self.names, self.interfaces, self.addresses, strict=True
        ):
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def start(self, node, words, **more):
        """Start a command on a node."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[node], *words], **more)

    def cut(self):
        """Pull the cable out of the second node."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def mend(self):
        """Plug it in again."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "up")

    def close(self):
        """Remove both."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
