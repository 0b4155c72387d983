"""Implementations found by their module's name."""

import sys

import pytest

from perfsearch.core import registry
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
    for name, module in (("deep", "space"), ("flat", "__init__")):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
        text = (
            f"from perfsearch.core.space import Space\n\nclass {name.title()}(Space):\n    pass\n"
        )
        (root / name / f"{module}.py").write_text(text)
    (root / "empty.py").write_text("from perfsearch.core.space import Space\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kinds_of_space"
    for name in [n for n in sys.modules if n.startswith("kinds_of_space")]:
        del sys.modules[name]


def test_public_modules_are_the_names_and_the_class_of_a_module_is_loaded(package):
    assert registry.names(package) == ["deep", "empty", "flat", "wide"]
    assert not [name for name in sys.modules if name.startswith("kinds_of_space")]
    found = registry.load(package, "space", "wide", Space)
    assert (found.__name__, issubclass(found, Space)) == ("Wide", True)


@pytest.mark.parametrize(("name", "module"), [("deep", "deep.space"), ("flat", "flat")])
def test_a_sub_package_implements_in_the_module_of_the_key_or_in_itself(package, name, module):
    found = registry.load(package, "space", name, Space)
    assert (found.__name__, found.__module__) == (name.title(), f"{package}.{module}")


def test_an_unknown_name_is_refused_with_the_nearest(package):
    with pytest.raises(LookupError, match=r"space=wade: unknown.*wide"):
        registry.load(package, "space", "wade", Space)


def test_a_module_that_only_imports_the_contract_implements_nothing(package):
    with pytest.raises(LookupError, match="defines no subclass of Space"):
        registry.load(package, "space", "empty", Space)
