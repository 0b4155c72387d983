"""What tuning is told, and what it makes of a job's knobs."""

import json

import pytest
from support.online_fakes import BASELINE, facts

from perfsearch.config.options import ConfigError
from perfsearch.core.errors import BadInputError
from perfsearch.online.knobs import make_space
from perfsearch.online.options import TUNABLE, AutotuneOptions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"level": 2}, "autotune.level=2"),
        ({"max_samples": 0}, "autotune.max_samples=0"),
        ({"max_sample": 3}, "autotune.max_sample: no such key"),
        ({"gaussian_process_noise": 0}, "autotune.gaussian_process_noise=0"),
        ({"steps_per_sample": "many"}, "autotune.steps_per_sample=many"),
        ({"knobs": {"nccl_algo": "Ring"}}, "cannot change between two steps"),
        ({"knobs": {"bucket_cap": 1}}, "bucket_cap_mb"),
        ({"freeze": "nowhere.csv"}, "there is no such file"),
        ({"numerics": "wild"}, "autotune.numerics=wild"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match="autotune") as caught:
        AutotuneOptions.from_mapping(values)
    assert message in str(caught.value)


def test_freeze_and_start_from_exclude_each_other(tmp_path):
    file = tmp_path / "log.csv"
    file.touch()
    with pytest.raises(ConfigError, match="only one of them"):
        AutotuneOptions.from_mapping({"freeze": file, "start_from": file})


def test_a_directory_is_no_log(tmp_path):
    with pytest.raises(ConfigError, match=r"autotune.log_file=.*: this is a directory. Give a"):
        AutotuneOptions.from_mapping({"log_file": tmp_path})
    assert tmp_path.is_dir()


def test_options_survive_the_way_to_another_process(tmp_path):
    options = AutotuneOptions.from_mapping(
        {"log_file": tmp_path / "a.csv", "knobs": {"bucket_cap_mb": [1, 2]}, "numerics": "exact"}
    )
    text = json.dumps(options.to_plain())
    assert AutotuneOptions.from_mapping(json.loads(text)) == options


def space_of(knobs=None, numerics="reordered", **changes):
    options = AutotuneOptions.from_mapping({"knobs": knobs or {}, "numerics": numerics})
    return make_space(facts(**changes), options)


def test_everything_tunable_is_searched_but_what_needs_a_promise():
    space, pinned, left_out = space_of()
    assert {k.name for k in space.knobs} == set(TUNABLE) - {"static_graph"}
    assert pinned == {"static_graph": False}
    assert "promise" in left_out["static_graph"]
    assert space.feasible({n: v for n, v in BASELINE.items() if n in space.by_name})


def test_a_promise_can_be_given():
    space, _, left_out = space_of({"static_graph": "search"})
    assert "static_graph" in space.by_name
    assert "static_graph" not in left_out


def test_buckets_end_where_everything_is_in_one():
    for gradient_mib, largest in ((500.0, 512.0), (40.0, 64.0), (3.0, 25.0), (5000.0, 512.0)):
        space, _, _ = space_of(gradient_mib=gradient_mib)
        assert max(space.by_name["bucket_cap_mb"].values) == largest, gradient_mib
        assert 25.0 in space.by_name["bucket_cap_mb"].values


def test_what_is_in_force_can_always_be_proposed():
    today = {**BASELINE, "bucket_cap_mb": 1000.0, "first_bucket_mb": 1000.0}
    space, _, _ = space_of(configuration=today)
    assert space.feasible({n: v for n, v in today.items() if n in space.by_name})


def test_a_scalar_fixes_and_a_list_narrows():
    space, pinned, _ = space_of({"bucket_cap_mb": [8, 100], "gradient_as_bucket_view": True})
    assert space.by_name["bucket_cap_mb"].values == (8, 25.0, 100)
    assert pinned["gradient_as_bucket_view"] is True


def test_exact_numerics_leaves_what_changes_no_sum():
    space, _, left_out = space_of(numerics="exact")
    assert {k.name for k in space.knobs} == {"gradient_as_bucket_view"}
    assert "reordered" in left_out["bucket_cap_mb"]


def test_what_the_ranks_cannot_change_stays():
    space, pinned, left_out = space_of(fixed={"bucket_cap_mb": "the script lists sizes"})
    assert "bucket_cap_mb" not in space.by_name
    assert pinned["bucket_cap_mb"] == 25.0
    assert left_out["bucket_cap_mb"] == "the script lists sizes"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"bucket_cap_mb": 5000}, "autotune.knobs.bucket_cap_mb=5000"),
        ({"optimizer_implementation": "quick"}, "autotune.knobs.optimizer_implementation=quick"),
        ({"hierarchical_group_size": 3}, "autotune.knobs.hierarchical_group_size=3"),
    ],
)
def test_impossible_values_name_key_and_remedy(knobs, message):
    with pytest.raises(BadInputError) as caught:
        space_of(knobs)
    assert message in str(caught.value)
    assert "allowed" in str(caught.value)


def test_what_does_not_exist_here_may_be_off_but_not_on():
    small = {"ranks_per_node": 2}
    space, _, left_out = space_of({"hierarchical_group_size": 0}, **small)
    assert "hierarchical_group_size" not in space.by_name
    assert "2 ranks" in left_out["hierarchical_group_size"]
    with pytest.raises(BadInputError, match="hierarchical_group_size=2"):
        space_of({"hierarchical_group_size": 2}, **small)


def test_a_value_that_the_ranks_cannot_bring_about_is_refused():
    fixed = {"optimizer_implementation": "RMSprop is not one of them"}
    assert space_of({"optimizer_implementation": "default"}, fixed=fixed)
    with pytest.raises(BadInputError, match="RMSprop"):
        space_of({"optimizer_implementation": "fused"}, fixed=fixed)


@pytest.mark.parametrize(
    ("asked", "step"),
    [
        ({"min": 40, "max": 90}, None),
        ({"min": 40, "max": 90, "step": 10, "log": False}, 10),
    ],
)
def test_a_range_is_kept_to_where_todays_value_lies_outside(asked, step):
    """25 MiB is in force: it is measured, and nothing between it and the range."""
    space, _, _ = space_of({"bucket_cap_mb": asked})
    today, *others = space.by_name["bucket_cap_mb"].values
    assert today == 25.0 and (others[0], others[-1]) == (40, 90)
    assert all(value % 10 == 0 for value in others) or step is None
    assert len(others) > 4


def test_a_range_around_todays_value_stays_a_range():
    space, _, _ = space_of({"bucket_cap_mb": {"min": 5, "max": 60, "step": 5}})
    knob = space.by_name["bucket_cap_mb"]
    assert (knob.low, knob.high, knob.step, knob.default) == (5, 60, 5, 25.0)


@pytest.mark.parametrize("step", ["abc", -1, 1e-9, float("nan")])
def test_steps_are_checked_as_in_a_search(step):
    with pytest.raises(BadInputError, match=r"autotune\.knobs\.bucket_cap_mb=\{step"):
        space_of({"bucket_cap_mb": {"step": step}})
