"""What a runner or a strategy needs is asked for before anything is made."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from perfsearch.cli.view import open_view
from perfsearch.config.options import ConfigError
from perfsearch.config.schema import validate
from perfsearch.pipeline import search
from perfsearch.runners.base import OwnModes
from perfsearch.runners.replay import Replay

TABLE = Path(__file__).parents[1] / "data" / "ddp_gpt2small_4xh100_tcp.csv"


def settings(**changes):
    plain = {"runner": {"name": "replay", "table": str(TABLE)}, "workload": {"name": "mlp"}}
    return validate({**plain, "strategy": {"name": "random"}, **changes})


@pytest.fixture
def _nothing_installed(monkeypatch) -> None:
    real = importlib.util.find_spec
    hidden = ("optuna", "numba")
    monkeypatch.setattr(
        search.importlib.util, "find_spec", lambda n: None if n in hidden else real(n)
    )


@pytest.mark.usefixtures("_nothing_installed")
def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path) -> None:
    asked = settings(strategy={"name": "optuna"}, run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"strategy=optuna: .*pip install 'optuna>=\d"):
        search.run(asked, open_view)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"runner=soap: .*pip install 'numba>=0\.\d"):
        search.run(settings(runner={"name": "soap"}), open_view)


def test_files_of_a_search_are_not_mixed_with_others(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("mine: true\n")
    with pytest.raises(ConfigError, match=r"it holds 'config.yaml' and no search"):
        search.run(settings(run_dir=str(tmp_path)), open_view)
    assert (tmp_path / "config.yaml").read_text() == "mine: true\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


class Estimating(Replay, OwnModes):
    """A runner that has an estimate, which it keeps."""

    own_modes = ("estimate",)

    def estimate(self, settings, note) -> int:
        settings.run_dir.mkdir(exist_ok=True)
        (settings.run_dir / "model_facts.json").write_text("{}")
        return 0


@pytest.mark.parametrize("foreign", [False, True])
def test_what_a_mode_without_a_search_leaves_does_not_block_one(
    tmp_path, monkeypatch, foreign
) -> None:
    monkeypatch.setattr(search.runners, "load", lambda name: Estimating)
    run_dir = tmp_path / "run"
    if foreign:
        run_dir.mkdir()
        (run_dir / "thesis.tex").touch()
    quiet = {"run_dir": str(run_dir), "tracking": {"enabled": False}}
    assert search.run(settings(mode="estimate", **quiet), open_view) == 0
    small = {"budget": {"trials": 1}, "confirm": {"max_repeats": 1}, **quiet}
    if foreign:
        with pytest.raises(ConfigError, match="and no search of perfsearch"):
            search.run(settings(**small), open_view)
    else:
        assert search.run(settings(**small), open_view) == 0


@pytest.mark.parametrize(
    ("runner", "has"),
    [
        ({"name": "zero"}, "mode=search and mode=profile and mode=estimate"),
        ({"name": "replay", "table": str(TABLE)}, "mode=search"),
    ],
)
def test_a_mode_that_a_runner_lacks_is_refused_with_those_that_it_has(runner, has) -> None:
    with pytest.raises(ConfigError, match=f"has only {has}\\.$"):
        search.build_runner(settings(runner=runner, mode="simulate"))
