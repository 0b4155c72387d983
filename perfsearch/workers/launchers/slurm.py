"""Ranks on the nodes of a Slurm allocation (``launcher=slurm``)."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from perfsearch.core.errors import BadInputError
from perfsearch.core.python import module_command
from perfsearch.workers.launchers._nodes import JOIN, SeveralNodes, Starter

_SCONTROL_S = 30.0


class Slurm(SeveralNodes):
    """Starts ranks by torch's launcher on each node of the allocation, which ``srun`` has join.

    The search itself runs inside of the allocation, on one of its nodes.
    """

    @dataclass(frozen=True)
    class Options(SeveralNodes.Options):
        """Options of the launcher, as keys ``launcher.*``.

        Attributes:
            srun: further options of ``srun``, as in ``["--mpi=none"]``.
            submit: whether the command submits a job of ``nnodes`` nodes that does the search, and
                shows what that says; the command itself is given anywhere.
            sbatch: further options of that job, as in ``["--gpus-per-node=8","--time=04:00:00"]``.

        """

        srun: tuple[str, ...] = ()
        submit: bool = False
        sbatch: tuple[str, ...] = ()

    def starters(self) -> list[Starter]:
        """See ``SeveralNodes``."""
        others = other_nodes(self.nnodes)
        join = module_command(JOIN, self.endpoint, "--secret-from-input")
        step = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=0"]
        return [
            Starter([*step, f"--nodelist={host}", *self.options.srun, *join], says=self.secret)
            for host in others
        ]


def other_nodes(nnodes: int) -> list[str]:
    """Nodes of the allocation beside this one.

    Raises:
        BadInputError: there is no allocation, or it has too few nodes.

    """
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if not listed or shutil.which("srun") is None:
        raise BadInputError(
            "launcher=slurm: this is no Slurm allocation (SLURM_JOB_NODELIST is not set, or there "
            f"is no srun). Start it inside of one: salloc --nodes={nnodes}, or sbatch; or have it "
            "submitted: launcher.submit=true."
        )
    names = subprocess.run(
        ["scontrol", "show", "hostnames", listed],
        capture_output=True,
        text=True,
        check=True,
        timeout=_SCONTROL_S,
    ).stdout.split()
    here = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    if here not in names:
        raise BadInputError(
            f"launcher=slurm: this is {here}, which is no node of the allocation ({listed}). Start "
            "the search on one of them: by sbatch, or inside of the allocation by srun --nodes=1 "
            "--ntasks=1 --overlap --pty."
        )
    others = [name for name in names if name != here]
    if len(others) < nnodes - 1:
        raise BadInputError(
            f"nnodes={nnodes}: the allocation has {len(names)} ({listed}). Ask Slurm for as many, "
            "or lower nnodes."
        )
    return others[: nnodes - 1]
