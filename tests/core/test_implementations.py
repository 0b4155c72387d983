"""Implementations found by their module's name."""

import sys

import pytest

from perfsearch.core import implementations
from perfsearch.core.space import Space


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Dotted name of a package with an implementation, a contract, and a module of neither."""
    root = tmp_path / "kinds_of_space"
    root.mkdir()
    (root / "__init__.py").touch()
    (root / "base.py").touch()
    (root / "_shared.py").touch()
    (root / "wide.py").write_text(
        "from perfsearch.core.space import Space\n\nclass Wide(Space):\n    pass\n"
    )
    (root / "empty.py").write_text("from perfsearch.core.space import Space\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kinds_of_space"
    for name in [n for n in sys.modules if n.startswith("kinds_of_space")]:
        del sys.modules[name]


def test_public_modules_are_the_names_and_the_class_of_a_module_is_loaded(package):
    assert implementations.names(package) == ["empty", "wide"]
    assert "kinds_of_space.wide" not in sys.modules
    found = implementations.load(package, "space", "wide", Space)
    assert (found.__name__, issubclass(found, Space)) == ("Wide", True)


def test_an_unknown_name_is_refused_with_the_nearest(package):
    with pytest.raises(LookupError, match=r"space=wade: unknown.*wide"):
        implementations.load(package, "space", "wade", Space)


def test_a_module_that_only_imports_the_contract_implements_nothing(package):
    with pytest.raises(LookupError, match="defines no subclass of Space"):
        implementations.load(package, "space", "empty", Space)
