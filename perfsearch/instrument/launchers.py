"""Notice a script that starts ranks of its own, or itself anew: no instrument reaches those."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from perfsearch.instrument.imports import after_import
from perfsearch.instrument.patches import wrap

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "srun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


class OwnLauncherError(RuntimeError):
    """The script starts ranks of its own, or itself anew; the message says how to go on."""


def explain(what: str, script: str) -> str:
    """What to tell the user of a script that launches itself."""
    return (
        f"{script} starts ranks of its own ({what}), where perfsearch-run has started its ranks "
        "already. Give perfsearch-run the function that one rank runs, as a script that torchrun "
        "could start: it reads RANK, LOCAL_RANK and WORLD_SIZE from the environment"
    )


def explain_exec(script: str) -> str:
    """What to tell the user of a script that another program takes the place of."""
    return (
        f"{script} has another program take the place of its process (os.exec...), as scripts do "
        "to set their own environment. Set that before perfsearch-run, so that it need not"
    )


def watch_for_launchers(script: str, refuse: Callable[[str], None]) -> None:
    """Have ``refuse`` called, with the explanation, before the script starts ranks of its own.

    Also before it replaces its process.
    """

    def spawn(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse(explain("torch.multiprocessing.spawn", script))
        return original(*args, **kwargs)

    def meet(module: ModuleType) -> None:
        wrap(module, "spawn", spawn)
        wrap(module, "start_processes", spawn)

    after_import("torch.multiprocessing", meet)
    owner = os.getpid()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.exec" and os.getpid() == owner:
            refuse(explain_exec(script))
        if event == "subprocess.Popen" and os.getpid() == owner:
            command = args[1]
            name = launcher_of(command if isinstance(command, list | tuple) else [command])
            if name:
                refuse(explain(name, script))

    sys.addaudithook(audit)


def launcher_of(command: Sequence[Any]) -> str:
    """The launcher of ranks that a command line starts; empty where it is something else."""
    words = [os.fsdecode(w) for w in command if isinstance(w, str | bytes | os.PathLike)]
    if len(words) == 1:
        words = words[0].split()
    if words and os.path.basename(words[0]) in _LAUNCHERS:
        return os.path.basename(words[0])
    modules = [after for before, after in itertools.pairwise(words) if before == "-m"]
    return next((module for module in modules if module in _MODULES), "")
