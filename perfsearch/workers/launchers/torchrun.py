"""Ranks on several nodes, each of which runs one command (``launcher=torchrun``)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from perfsearch.core.option import option
from perfsearch.core.python import module_command
from perfsearch.workers.launchers._nodes import SeveralNodes, Starter

JOIN = "perfsearch.workers.join"
"""The module behind ``perfsearch join``."""


class Torchrun(SeveralNodes):
    """Starts ranks by torch's launcher on each node that has joined."""

    @dataclass(frozen=True)
    class Options:
        """Options of the launcher, as keys ``launcher.*``.

        Attributes:
            endpoint: ``HOST:PORT`` of this node, at which the others reach it; ``null``: its own
                address, any port.
            interface: network interface of the ranks' sockets; ``null``: the one that leads to the
                endpoint.
            hosts: nodes on which the command is run through ``ssh``; by default you run it.
            wait_s: longest wait for a node that is missing, in seconds.

        """

        endpoint: str | None = None
        interface: str | None = None
        hosts: tuple[str, ...] = ()
        wait_s: float = option(600.0, low=0.0)

    def starters(self) -> list[Starter]:
        """See ``SeveralNodes``."""
        join = shlex.join(module_command(JOIN, self.endpoint, "--secret-from-input"))
        there = f"cd {shlex.quote(os.getcwd())} && exec {join}"
        return [
            Starter(["ssh", "-o", "BatchMode=yes", host, there], says=self.secret)
            for host in self.options.hosts
        ]
