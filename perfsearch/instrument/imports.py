"""Act on a module once the script has imported it, so that nothing is imported for its sake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
