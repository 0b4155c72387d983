"""How a configuration is composed, also of knobs that no option file can name."""

from pathlib import Path

import pytest

import perfsearch
from perfsearch.config.compose import compose, open_keys
from perfsearch.config.options import ConfigError
from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["runner=soap", 'runner.knobs.leave="2x1@0,1"'], "++runner.knobs.leave"),
        (["runner.knobs.x=1", "workload=script"], "++runner.knobs.x"),
        (["runner=ddp", "runner=soap", "runner.knobs.x=1"], "++runner.knobs.x"),
        (["runner=soap", "runner=ddp", "runner.knobs.x=1"], "runner.knobs.x"),
        (["workload=script", "runner.knobs={x: 1}"], "++runner.knobs"),
        (["workload=script", "runner.knobs=auto"], "runner.knobs"),
        (["runner=soap", "+runner.knobs.x=1"], "+runner.knobs.x"),
        (["workload=mlp", "runner.knobs.x=1"], "runner.knobs.x"),
    ],
)
def test_only_where_the_job_itself_names_them(words, key):
    assert next(w for w in open_keys(words) if "knobs" in w).startswith(f"{key}=")
    assert [w.lstrip("+") for w in open_keys(words)] == [w.lstrip("+") for w in words]


def test_an_operator_is_pinned_without_a_plus_sign():
    found = compose(["runner=soap", 'runner.knobs.leave="2x1@0,1"'], {})
    assert found["runner"]["knobs"] == {"leave": "2x1@0,1"}


def test_a_scripts_own_knob_stands_beside_those_of_the_file():
    words = ["workload=script", "workload.command=[t.py]", "runner.knobs.persistent_workers=false"]
    knobs = compose(words, {})["runner"]["knobs"]
    assert knobs["persistent_workers"] is False and knobs["bucket_cap_mb"] == "search"


def test_a_mapping_of_knobs_is_taken_as_they_are_one_by_one():
    words = [
        "workload=script",
        "workload.command=[t.py]",
        "runner.knobs={persistent_workers: [true]}",
    ]
    knobs = compose(words, {})["runner"]["knobs"]
    assert knobs["persistent_workers"] == [True] and knobs["bucket_cap_mb"] == "search"
    with pytest.raises(BadInputError, match=r"^runner\.knobs\.persistent_workers: no such key"):
        compose(words[2:], {})


def test_a_comma_in_an_operators_devices_is_no_sweep():
    with pytest.raises(BadInputError) as caught:
        compose(["runner=soap", "runner.knobs.leave=2x1@0,7"], {})
    assert "'runner.knobs.leave=\"2x1@0,7\"'" in str(caught.value)
    assert str(caught.value).startswith("runner.knobs.leave=2x1@0,7: ")


def test_hydras_private_parts_are_used_in_one_place():
    """Its parser, which it shows nowhere else; a release may change any other without notice."""
    root = Path(perfsearch.__file__).parent
    users = {
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if "hydra._internal" in line
    }
    assert users == {"cli/search.py: from hydra._internal.utils import get_args_parser"}


def test_a_key_of_one_strategy_of_several_is_for_that_one():
    words = ["strategy=bayes", "strategy.bayes.xi=0.1", "strategy.fast.plateau=0.2"]
    with pytest.raises(ConfigError, match="it is for strategy=fast,"):
        open_keys(words)
    opened = open_keys(["-m", "strategy=bayes,fast", *words[1:]])
    assert opened[2:] == [f"++{word}" for word in words[1:]]
    for name, key, value in (("bayes", "xi", 0.1), ("fast", "plateau", 0.2)):
        settings = validate(compose([f"strategy={name}", *opened[2:], "runner=ddp"], {}))
        assert settings.strategy.options[key] == value
        assert not settings.strategy.options.keys() & {"bayes", "fast"}
