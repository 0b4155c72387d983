"""What every runner of the registry must have beside its own tests."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from perfsearch.core.docstrings import attribute_help
from perfsearch.runners import load, names
from perfsearch.runners.base import NoKnobs, OwnModes

CONF = Path(__file__).parents[2] / "conf" / "runner"


@pytest.mark.parametrize("name", names())
def test_options_are_frozen_documented_and_listed_in_the_file(name):
    options = load(name).Options
    assert is_dataclass(options)
    assert options.__dataclass_params__.frozen
    keys = [f.name for f in fields(options)]
    assert set(attribute_help(options)) == set(keys)
    written = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert written.pop("name") == name
    assert set(written) == set(keys)


@pytest.mark.parametrize("name", names())
def test_what_it_says_of_itself_is_there(name):
    runner = load(name)
    assert not runner.__abstractmethods__
    if issubclass(runner, OwnModes):
        assert runner.own_modes
        assert all(callable(getattr(runner, mode)) for mode in runner.own_modes)
    if issubclass(runner, NoKnobs):
        assert runner.no_knobs
    assert issubclass(runner, NoKnobs) != ("knobs" in {f.name for f in fields(runner.Options)})
