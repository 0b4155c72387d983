"""Where an unchanged script is met: after an import, around a call, before it launches ranks.

Nothing is imported for the sake of it, and no torch here.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from perfsearch.core.python import large_imports

Then = Callable[[ModuleType], None]


class _AfterLoader(Loader):
    """The module's own loader, and then what waits for the module."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for those who only look a module up

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._finder.underway.add(module.__name__)
        try:
            with large_imports():
                self._loader.exec_module(module)
        finally:
            self._finder.underway.remove(module.__name__)
        for then in self._finder.waiting.pop(module.__name__, ()):
            then(module)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Then]] = {}
        self.underway: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            # asked as Python asks: an editable install has a finder of its own
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _AfterLoader(spec.loader, self)
                return spec
        return None


_finder = _Finder()


def expect(*names: str) -> None:
    """See that ``after_import`` works for these even while they are being imported."""
    for name in names:
        if name not in sys.modules:
            _finder.waiting.setdefault(name, [])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def after_import(name: str, then: Then) -> None:
    """Call ``then`` with the module ``name``: now, or right after it has been imported."""
    module = sys.modules.get(name)
    if module is not None and name not in _finder.underway:
        then(module)
        return
    expect(name)
    _finder.waiting[name].append(then)


# -----------------------------------------------------------------------------
# Wrap constructors and methods of a library, and leave them alone where that is asked for.

held_elsewhere = False
"""Whether modules were imported before the instruments came, and hold functions by own names."""

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the original, the positional arguments (the object first) and the others; calls it."""

_local = threading.local()


@contextmanager
def untouched() -> Iterator[None]:
    """Let everything that is built inside the block be built as it is written."""
    before = getattr(_local, "off", False)
    _local.off = True
    try:
        yield
    finally:
        _local.off = before


def wrap(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Let ``around`` stand before ``owner.name``; return a function that takes it away.

    On a class the wrapper serves every subclass, objects keep their class, and names that were
    imported before refer to the same class. A call inside of an ``untouched`` block goes straight
    to the original.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "off", False):
            return original(*args, **kwargs)
        return around(original, args, kwargs)

    setattr(owner, name, wrapper)
    holders = _holders(original) if held_elsewhere and isinstance(owner, ModuleType) else []
    for holder, own_name in holders:
        setattr(holder, own_name, wrapper)

    def undo() -> None:
        for holder, own_name in [*holders, (owner, name)]:
            setattr(holder, own_name, original)

    return undo


def _holders(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Modules that have a function by a name of their own (``from x import y``), and the name."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is function
    ]


def once(function: Callable[[], None]) -> Callable[[], None]:
    """The function for its first call; later ones do nothing."""
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            function()

    return call


# -----------------------------------------------------------------------------
# What is met in frameworks once a script imports them.

CALLBACKS = "callbacks"
METRICS = "reduce_metrics"

ENGINE = "deepspeed.runtime.engine"
"""DeepSpeed's module of its engine."""

_RESULTS = "trainer.connectors.logger_connector.result"
CALLS = (
    ("transformers.trainer_callback", "CallbackHandler.call_event", CALLBACKS),
    ("lightning.pytorch.trainer.call", "_call_callback_hooks", CALLBACKS),
    ("pytorch_lightning.trainer.call", "_call_callback_hooks", CALLBACKS),
    ("transformers.trainer_pt_utils", "nested_gather", METRICS),
    ("accelerate.accelerator", "Accelerator.gather_for_metrics", METRICS),
    (f"lightning.pytorch.{_RESULTS}", "_ResultCollection.metrics", METRICS),
    (f"pytorch_lightning.{_RESULTS}", "_ResultCollection.metrics", METRICS),
)
"""Module, function in it, and the phase that its calls are; each module is named once."""

MODULES = (ENGINE, *(module for module, _, _ in CALLS))
"""They import torch on their way, with which the instruments come."""


# -----------------------------------------------------------------------------
# Notice a script that starts ranks of its own, or itself anew: no instrument reaches those.

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "srun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


class OwnLauncherError(RuntimeError):
    """The script starts ranks of its own, or itself anew; the message says how to go on."""


def explain_own_launch(what: str, script: str) -> str:
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
        refuse(explain_own_launch("torch.multiprocessing.spawn", script))
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
                refuse(explain_own_launch(name, script))

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
