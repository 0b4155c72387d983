import gc
import importlib.util
import sys

import pytest

from perfsearch.instrument import patching
from perfsearch.instrument.patching import after_import, expect


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("from .inner import value\n")
    (tmp_path / "late_package" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "late_package"
    for name in ("late_package", "late_package.inner"):
        sys.modules.pop(name, None)


def test_a_module_is_changed_before_others_take_from_it(package):
    after_import("late_package.inner", lambda module: setattr(module, "value", 2))
    assert "late_package" not in sys.modules
    import late_package

    assert late_package.value == 2
    assert late_package.inner.__spec__.loader.get_source("late_package.inner") == "value = 1\n"


def test_what_has_been_imported_is_changed_at_once(package):
    import late_package

    after_import("late_package.inner", lambda module: setattr(module, "value", 3))
    assert late_package.inner.value == 3


def test_a_module_that_is_looked_up_before_it_is_imported_is_changed_too(package):
    after_import(package, lambda module: setattr(module, "value", 4))
    assert importlib.util.find_spec(package).loader.get_filename() is not None
    assert package not in sys.modules
    import late_package

    assert late_package.value == 4


def test_one_that_imports_what_asks_for_it_is_changed_when_it_is_whole(package):
    """As a framework's module does that imports torch, with which the instruments come."""
    expect("late_package")
    when = []

    def asks(inner):
        after_import("late_package", lambda module: when.append(module.value))
        assert not when and "late_package" in sys.modules

    after_import("late_package.inner", asks)
    import late_package

    assert when == [late_package.value] == [1]


def test_no_garbage_is_looked_for_while_it_is_imported(package, tmp_path):
    (tmp_path / package / "inner.py").write_text("import gc\nvalue = gc.isenabled()\n")
    expect("late_package.inner")
    import late_package

    assert (late_package.value, gc.isenabled()) == (False, True)


def test_a_function_that_others_had_taken_before_is_wrapped_there_too(package, monkeypatch):
    import late_package

    def function():
        return "plain"

    late_package.inner.function = late_package.taken = function
    monkeypatch.setattr(patching, "held_elsewhere", True)
    undo = patching.wrap(late_package.inner, "function", lambda original, *_: f"not {original()}")
    assert late_package.taken() == late_package.inner.function() == "not plain"
    undo()
    assert late_package.taken is late_package.inner.function is function
