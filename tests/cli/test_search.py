import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import front_fakes
from support.front_fakes import refused

from perfsearch.cli import search as cli
from perfsearch.cli.help import option_files
from perfsearch.config.schema import Settings, to_plain, validate
from perfsearch.core.signals import ExitCode
from perfsearch.core.version import version

TESTS = Path(__file__).parents[1]
SURFACE = TESTS / "data" / "command_line.txt"


def knobs_of_last_call():
    settings, runner, _ = front_fakes.calls[-1]
    return settings.runner.options["knobs"], runner


def test_a_search_gets_settings_runner_and_strategy(command, tmp_path):
    code, out, _ = command("seed=7", "strategy.jitter=0.5", "budget.trials=3")
    assert code == 0
    assert "seed 7" in out
    settings, runner, strategy = front_fakes.calls[0]
    assert settings.budget.trials == 3
    assert strategy.seed == 7
    assert strategy.options.jitter == 0.5
    assert runner.space.by_name.keys() == {k.name for k in front_fakes.KNOBS}
    assert list(tmp_path.iterdir()) == [], "Hydra must leave nothing behind"
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize(
    ("override", "setting", "searched"),
    [
        ("runner.knobs.bucket_cap_mb=25", 25, False),
        ("runner.knobs.bucket_cap_mb=[8,25,64]", [8, 25, 64], True),
        ("runner.knobs.bucket_cap_mb={min: 2, max: 64}", {"min": 2, "max": 64}, True),
        ("runner.knobs.bucket_cap_mb=null", None, False),
        ("runner.knobs.bucket_cap_mb=search", "search", True),
    ],
)
def test_every_way_to_write_a_knob_composes(command, override, setting, searched):
    """hydra-ecosystem/hydra#1547, #403: lists are replaced, knobs are mappings."""
    code, _, err = command(override)
    assert code == 0, err
    knobs, runner = knobs_of_last_call()
    assert knobs["bucket_cap_mb"] == setting
    assert ("bucket_cap_mb" in runner.space.by_name) == searched


def test_a_dropped_knob_keeps_its_default(command):
    """hydra-ecosystem/hydra#1547, #403"""
    code, _, err = command("~runner.knobs.bucket_cap_mb")
    assert code == 0, err
    knobs, runner = knobs_of_last_call()
    assert "bucket_cap_mb" not in knobs
    assert runner.pinned["bucket_cap_mb"] == 25


def test_a_list_means_choices_and_a_scalar_is_fixed(command):
    """huggingface/accelerate#1830"""
    command("runner.knobs.bucket_cap_mb=[8]", "runner.knobs.static_graph=true")
    _, runner = knobs_of_last_call()
    assert runner.space.by_name["bucket_cap_mb"].values == (8,)
    assert runner.pinned == {"static_graph": True}
    _, out, _ = command("runner.knobs.bucket_cap_mb=[8]", "runner.knobs.static_graph=true", "-cjob")
    assert "  bucket_cap_mb:\n  - 8\n  static_graph: true\n" in re.sub(r"  ( +)", r"  ", out)


def test_a_users_own_file_can_hold_any_form_of_knob(command, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nrunner:\n  knobs:\n    bucket_cap_mb: {min: 2, max: 64, log: true}\n"
        "    optimizer_implementation: [foreach, fused]\n    static_graph: null\n"
    )
    searchpath = f"hydra.searchpath=[file://{tmp_path}/own]"
    code, _, err = command(searchpath, "experiment=mine")
    assert code == 0, err
    knobs, runner = knobs_of_last_call()
    assert knobs["bucket_cap_mb"] == {"min": 2, "max": 64, "log": True}
    assert runner.space.by_name["optimizer_implementation"].values == ("foreach", "fused")


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_is_the_pipelines(command, code):
    assert command(f"tracking.experiment=exit-{code}")[0] == code


def test_a_mode_that_the_runner_has(command):
    code, out, _ = command("mode=profile")
    assert code == 0
    assert "profiled" in out
    assert front_fakes.calls == []


def test_a_recorded_configuration_fed_back_runs_exactly_that(command, tmp_path):
    import yaml

    command("runner.knobs.bucket_cap_mb=[8,25]", "~runner.knobs.static_graph", "seed=3")
    first = front_fakes.calls.pop()[0]
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.yaml").write_text(yaml.safe_dump(to_plain(first)))
    code, _, err = command("--config-path", "best", prefix=False)
    assert code == 0, err
    assert front_fakes.calls.pop()[0] == first
    code, _, err = command("-m", "--config-path", "best", "seed=4,5", prefix=False)
    assert code == 0, err
    assert [c[0] for c in front_fakes.calls] == [replace(first, seed=4), replace(first, seed=5)]
    front_fakes.calls.clear()
    refused(command("--config-path", "best", "sed=4", prefix=False), "Did you mean 'seed'?")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "outputs"]


def test_a_sweep_runs_every_combination_and_ends_with_the_worst_code(command, tmp_path):
    code, _, err = command("-m", "seed=1,2", "tracking.experiment=exit-0,exit-3")
    assert code == 3, err
    assert [(c[0].seed, c[0].tracking.experiment) for c in front_fakes.calls] == [
        (1, "exit-0"), (1, "exit-3"), (2, "exit-0"), (2, "exit-3"),
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.parametrize("bad", ["seed=1,x", "runner.knobs.bucket_cap_mb=25,4000", "nproc=1,8"])
def test_a_bad_value_in_a_sweep_stops_it_before_any_job(command, bad):
    refused(command("-m", bad), bad.partition("=")[0], bad.rpartition(",")[2])


def test_a_signal_ends_the_whole_sweep(command):
    code, _, _ = command("-m", "seed=1,2,3", "tracking.experiment=exit-130")
    assert code == 130
    assert len(front_fakes.calls) == 1


def test_policy_on_failure_reaches_the_search(command):
    """hydra-ecosystem/hydra#2824"""
    for policy in ("stop", "continue"):
        assert command(f"on_failure={policy}")[0] == 0
        assert front_fakes.calls.pop()[0].on_failure == policy
    refused(command("on_failure=halt"), "on_failure=halt", "continue", "stop")


def test_python_3_14_is_told_in_one_line(command, monkeypatch):
    """hydra-ecosystem/hydra#3121"""
    monkeypatch.setattr(cli.sys, "version_info", (3, 14, 0, "final", 0))
    refused(command(), "Python 3.14", "3.11")
    assert command("--help", prefix=False)[0] == 0


def test_help_names_groups_options_and_keys(command):
    code, out, _ = command("--help", prefix=False)
    assert code == 0
    for option in option_files():
        assert option.name in out
    for name in ("runner=", "strategy=", "workload=", "experiment=", "budget.trials=25"):
        assert name in out
    page = (TESTS.parent / "docs" / "commands.md").read_text()
    for text in (out.rpartition("Exit: ")[2], page.rpartition("Exit codes: ")[2]):
        told = text.split("\n\n")[0]
        assert {int(n) for n in re.findall(r"\b\d+\b", told)} == set(ExitCode)
    assert max(map(len, out.splitlines())) <= 100


def test_version(command):
    assert command("--version", prefix=False)[1] == f"perfsearch {version()}\n"


def test_help_is_of_what_is_chosen(command):
    _, plain, _ = command("--help", prefix=False)
    _, zero, _ = command("runner=zero", "strategy=bayes", "--help", prefix=False)
    _, everything, _ = command("--help-all", prefix=False)
    assert plain.index("Examples:") < plain.index("Usage:") < plain.index("Groups (")
    assert "  first_bucket_mb" in plain and "zero_stage" not in plain
    assert "  zero_stage" in zero and "first_bucket_mb" not in zero
    assert "Keys of strategy=bayes" in zero and "Keys of strategy=bayes" not in plain
    assert "metrics.thresholds." not in plain
    for told in ("  zero_stage", "  first_bucket_mb", "metrics.thresholds.comm_moderate="):
        assert told in everything
    assert len(plain.splitlines()) < len(everything.splitlines()) / 2


@pytest.mark.parametrize("option", [o.name for o in option_files() if o.group == "experiment"])
def test_every_shipped_experiment_composes(command, option):
    """hydra-ecosystem/hydra#3047, #394"""
    code, out, err = command(f"experiment={option}", "--cfg", "job", prefix=False)
    assert code == 0, err
    assert out != command("--cfg", "job", prefix=False)[1]


def composed(command, *arguments):
    from omegaconf import OmegaConf

    code, out, err = command(*arguments, "--cfg", "job", prefix=False)
    assert code == 0, err
    return OmegaConf.to_container(OmegaConf.create(out))


def leaves(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def current_surface(command):
    lines = [f"group {o.group}={o.name}" for o in option_files()]
    plain = composed(command)
    groups = ("runner", "strategy", "workload")
    top = {k: v for k, v in plain.items() if k not in groups}
    lines += [f"key {key}" for key in leaves(top)]
    for option in option_files():
        if option.group in groups:
            lines += [f"key {option.group}={option.name}: {key}" for key, _ in option.keys]
    return lines


def test_the_command_lines_surface_is_frozen(command):
    """What is on the command line changes on purpose only, and in this list too.

    ``PERFSEARCH_UPDATE=1`` writes the list anew.
    """
    now = current_surface(command)
    if os.environ.get("PERFSEARCH_UPDATE"):
        SURFACE.write_text("\n".join(now) + "\n")
    assert now == SURFACE.read_text().splitlines()


def test_defaults_on_the_command_line_are_those_of_python(command):
    plain = composed(command, f"hydra.searchpath=[file://{front_fakes.CONF}]", "runner=fake",
                     "strategy=fake")  # fmt: skip
    plain.pop("experiment", None)
    chosen = {name: plain.pop(name) for name in ("runner", "strategy", "workload")}
    empty = validate(chosen)
    assert validate({**plain, **chosen}) == empty
    assert set(plain) | set(chosen) == {f.name for f in Settings.__dataclass_fields__.values()}
