import sys

import pytest

from perfsearch.instrument.imports import after_import


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
