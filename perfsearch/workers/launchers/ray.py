"""Ranks on the nodes of a Ray cluster (``launcher=ray``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec

from perfsearch.core.errors import BadInputError
from perfsearch.core.extras import how_to_install
from perfsearch.core.hardware import Hardware
from perfsearch.core.option import option
from perfsearch.core.python import module_command
from perfsearch.workers.launchers._nodes import SeveralNodes, Starter
from perfsearch.workers.launchers.base import Say

_ACTORS = "perfsearch.workers.launchers._ray_actors"


class Ray(SeveralNodes):
    """Starts ranks by torch's launcher on each node of a placement group, which actors have join.

    The search itself runs on a node of the cluster, and has a share of the group there.
    """

    @dataclass(frozen=True)
    class Options(SeveralNodes.Options):
        """Options of the launcher, as keys ``launcher.*``.

        Attributes:
            address: of the cluster; ``null``: the one that this node is of.
            cpus: CPUs that the placement group has on each node; ``null``: one a rank.
            reserve_here: whether the group has a bundle on this node; not in a job of Ray's that
                was given its devices, as by ``--entrypoint-num-gpus``.

        """

        address: str | None = None
        cpus: float | None = option(None, above=0.0)
        reserve_here: bool = True

    def open(self, hardware: Hardware, say: Say) -> None:
        """See ``Launcher``."""
        if find_spec("ray") is None:
            raise BadInputError(f"launcher=ray needs Ray. Run: {how_to_install('ray', 'ray')}")
        self._bundle = {"CPU": self.options.cpus or float(hardware.nproc)}
        if hardware.gpus:
            self._bundle["GPU"] = float(hardware.nproc)
        super().open(hardware, say)

    def starters(self) -> list[Starter]:
        """One command for all: the group is had whole or not at all."""
        asked = {
            "address": self.options.address or "auto",
            "endpoint": self.endpoint,
            "interface": self.options.interface or "",
            "wait_s": self.options.wait_s,
            "others": self.nnodes - 1,
            "bundle": self._bundle,
            "reserve_here": self.options.reserve_here,
        }
        return [Starter(module_command(_ACTORS, json.dumps(asked)), says=self.secret)]
