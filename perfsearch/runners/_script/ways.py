"""How a script is started: one process as ``python`` starts it, or ranks as torchrun does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from perfsearch.core import command
from perfsearch.core.hardware import Hardware
from perfsearch.core.trial import Outcome
from perfsearch.instrument.launch import calls_for_torchrun
from perfsearch.workers.failures import FailureFiles, first_error, one_line


@dataclass(frozen=True)
class Way:
    """How the processes of a script are started.

    Attributes:
        ranks: how many there are on a node.
        by_torchrun: whether torchrun starts them, so that ``RANK`` and its like are set.
        nnodes: nodes that they are on.

    """

    ranks: int
    by_torchrun: bool
    nnodes: int = 1

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.ranks * self.nnodes

    def words(self, module: bool) -> list[str]:
        """The command that starts a script so, up to the script's name."""
        alone = ["--standalone"]
        nodes = [f"--nnodes={self.nnodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:PORT"]
        where = alone if self.nnodes == 1 else nodes
        ranks = ["torchrun", *where, f"--nproc-per-node={self.ranks}"]
        return [*(ranks if self.by_torchrun else ["python"]), *(["-m"] if module else [])]

    def to_identity(self) -> dict[str, str]:
        """As a search's record has it, by which a resumed one goes on the same way."""
        nodes = {} if self.nnodes == 1 else {_NNODES: str(self.nnodes)}
        launcher = {_LAUNCHER: _NAMES[self.by_torchrun]}
        return {"world_size": str(self.world_size), **launcher, **nodes}

    @classmethod
    def from_identity(cls, identity: Mapping[str, str]) -> Self:
        """What ``to_identity`` wrote."""
        nnodes = int(identity.get(_NNODES, 1))
        ranks = int(identity["world_size"]) // nnodes
        return cls(ranks, identity.get(_LAUNCHER) != _NAMES[False], nnodes)


_LAUNCHER = "launcher"
_NNODES = "nnodes"
_NAMES = {True: "torchrun", False: "python"}


@dataclass
class Finder:
    """Finds how a script is meant to be started, from how its first starts went.

    Where a number of ranks or several nodes are asked for, it is given them by torchrun. Else it
    gets one process as ``python`` starts it, or ranks on all GPUs where there are several.

    Args:
        asked: the number of ranks that is asked for.
        hardware: of as many ranks as there can be.

    """

    asked: int | None
    hardware: Hardware
    needs_torchrun: bool = False
    trains_apart: bool = False
    known: Way | None = None

    @property
    def way(self) -> Way:
        """The way that is right as far as is known."""
        if self.known is not None:
            return self.known
        nnodes = self.hardware.nnodes
        if self.asked is not None or nnodes > 1:
            return Way(self.asked or self.hardware.nproc, by_torchrun=True, nnodes=nnodes)
        ranks = len(self.hardware.gpus) or 1
        if self.trains_apart:
            ranks = 1
        elif self.needs_torchrun:
            ranks = self.hardware.nproc
        return Way(ranks, self.needs_torchrun or ranks > 1)

    def other(self, failure: Outcome, apart: bool, steps: int) -> str:
        """Find another way than the present one, which failed.

        Args:
            failure: how.
            apart: whether it was that its ranks train apart from each other.
            steps: that the script had made.

        Returns:
            Why, for the user; empty where there is no other way.

        """
        before = self.way
        settled = self.asked is not None or self.known is not None or before.nnodes > 1
        if settled or (steps and not apart):
            return ""
        if apart:
            self.trains_apart = True
            return (
                f"its {before.ranks} ranks train apart from each other, so it is a script for one "
                f"process: {self._now()}"
            )
        missing = "" if before.by_torchrun else _named(failure)
        if not missing:
            return ""
        self.needs_torchrun = True
        return f"the script is one for torchrun ({missing}): {self._now()}"

    def _now(self) -> str:
        way = self.way
        many = f"{way.ranks} rank" + "s" * (way.ranks > 1)
        how = f"with {many} by torchrun" if way.by_torchrun else "as python starts it"
        more = f"; {command.given().ranks('N')} for another number" if way.ranks > 1 else ""
        return f"from here on it is started {how}{more}"


def _named(failure: Outcome) -> str:
    """The script's last words where they name what only torchrun sets; or empty."""
    files = FailureFiles(Path(failure.log_path).parent, world_size=1)
    error = first_error(files.errors())
    if error is not None:
        found = calls_for_torchrun(f"{error.type}: {error.message}\n{error.traceback}")
        return one_line(f"{error.type}: {error.message}", 120) if found else ""
    lines = [line for line in files.tails().get(0, "").splitlines() if calls_for_torchrun(line)]
    return one_line(lines[-1], 120) if lines else ""
