"""Ranks on several nodes, each of which runs one command (``launcher=torchrun``)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

from perfsearch.core.python import module_command
from perfsearch.workers.launchers._nodes import JOIN, SeveralNodes, Starter


class Torchrun(SeveralNodes):
    """Starts ranks by torch's launcher on each node that has joined."""

    @dataclass(frozen=True)
    class Options(SeveralNodes.Options):
        """Options of the launcher, as keys ``launcher.*``.

        Attributes:
            hosts: nodes on which the command is run through ``ssh``; by default you run it.

        """

        hosts: tuple[str, ...] = ()

    def starters(self) -> list[Starter]:
        """See ``SeveralNodes``."""
        join = shlex.join(module_command(JOIN, self.endpoint, "--secret-from-input"))
        there = f"cd {shlex.quote(os.getcwd())} && exec {join}"
        return [
            Starter(["ssh", "-o", "BatchMode=yes", host, there], says=self.secret)
            for host in self.options.hosts
        ]
