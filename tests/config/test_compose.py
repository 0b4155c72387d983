"""How a configuration is composed, also of knobs that no option file can name."""

from pathlib import Path

import pytest

import perfsearch
from perfsearch.config.compose import compose, open_knobs
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
    assert next(w for w in open_knobs(words) if "knobs" in w).startswith(f"{key}=")
    assert [w.lstrip("+") for w in open_knobs(words)] == [w.lstrip("+") for w in words]


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
