"""Act on a module once the script has imported it, so that nothing is imported for its sake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _AfterLoader(Loader):
    """The module's own loader, and then a function of the module."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._then(module)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = self.waiting.pop(fullname, None)
        if then is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoader(spec.loader, then)
        return spec


_finder = _Finder()


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with the module ``name``: now, or right after it has been imported."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    _finder.waiting[name] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
