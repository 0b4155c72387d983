"""What ``mode=estimate`` of ``runner=zero`` prints."""

import re

import pytest
from support.zero_cases import make
from support.zero_facts import GivenFacts, gpt_facts, gpt_large

from perfsearch.cli.view import View
from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.runners.zero.runner import Zero

STAGES = ("0 ", "1 ", "2 ", "3 ")


def test_the_estimate_shows_only_what_a_search_may_try(capsys):
    def table(batch="fixed", **options):
        make(batch, card="H100", **options).estimate(None, View().note)
        lines = capsys.readouterr().out.splitlines()
        columns = re.findall(r"(\d+) x (\d+)", next(x for x in lines if x.startswith("ZeRO")))
        return [(int(m), int(t)) for m, t in columns], [x for x in lines if x[:2] in STAGES]

    columns, rows = table("free", min_train_batch_size=33, max_train_batch_size=80)
    assert (16, 1) in columns
    assert all(33 <= m * times * 4 <= 80 for m, times in columns)
    columns, rows = table(knobs={"micro_batch": [4, 8], "zero_stage": [1, 3],
                                 "activation_checkpointing": 2})  # fmt: skip
    assert columns == [(4, 4), (8, 2)]
    assert [(row[0], "1 in 2" in row) for row in rows] == [("1", True), ("3", True)]
    columns, rows = table("free", knobs={"micro_batch": [4, 8], "gradient_accumulation": 8})
    assert columns == [(4, 8), (8, 8)]
    assert {row[0] for row in rows} == {"0"}
    with pytest.raises(BadInputError, match="no micro_batch with any gradient_accumulation"):
        table("free", max_train_batch_size=64,
              knobs={"micro_batch": 16, "gradient_accumulation": [2, 4]})  # fmt: skip


def test_a_device_of_mebibytes_is_told_in_them(capsys):
    make(device_memory_gib=0.008).estimate(None, View().note)
    assert "8.19 MiB a device, of which 7.78 may be used" in capsys.readouterr().out


def test_the_estimate_is_a_table_for_a_card_that_is_absent(capsys):
    plain = {
        "mode": "estimate",
        "runner": {"name": "zero", "card": "H100"},
        "strategy": {"name": "fast"},
        "workload": {"name": "gpt", "size": "large", "global_batch": 128},
        "nproc": 4,
        "batch": "free",
    }
    configuration = validate(plain)
    runner = Zero.from_settings(configuration)
    runner.memory.facts = GivenFacts(gpt_large())
    assert runner.estimate(configuration, View().note) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "774.0 M parameters" in lines[0]
    assert lines[1].startswith("79.2 GiB a device, of which 75.2 may be used")
    head = next(line for line in lines if line.startswith("ZeRO stage"))
    assert head.split()[-2:] == ["x", "1"]
    rows = [line for line in lines if line[:2] in STAGES]
    assert len(rows) == 8
    at_rest = [float(row.split("none")[1].split()[0]) for row in rows if "none" in row]
    gib = 774_030_080 * 4 / 2**30
    assert at_rest == pytest.approx([5 * gib, 3.5 * gib, gib, gib], rel=0.03)
    assert " no" in rows[0]
    assert " ok" in rows[-1]


@pytest.mark.parametrize(
    ("facts", "unit", "margin"),
    [
        (gpt_facts(1, 64, vocabulary=100, length=4,
                   activations={"autocast/0": (0.0, 100.0), "policy/0": (0.0, 100.0)}),
         "MiB", r"0\.4\d GiB"),
        (gpt_large(), "GiB", r"0\.7\d to 8\.\d\d GiB"),
    ],
)  # fmt: skip
def test_the_margin_is_a_size_and_small_tables_are_in_mib(capsys, facts, unit, margin):
    make(card="H100", facts=facts).estimate(None, View().note)
    lines = capsys.readouterr().out.splitlines()
    assert f"predicted peak in {unit} " in lines[-1]
    assert re.search(f"margin: 2 standard deviations, {margin} here before any trial", lines[-1])
    at_rest = [float(line.split()[4]) for line in lines if line.startswith("3 ")]
    assert min(at_rest) > 0


def test_no_facts_means_no_estimate_and_no_crash(capsys):
    runner = make(card="H100")
    runner.memory.facts = GivenFacts(None)
    runner.memory.facts.error = "ValueError: no"
    assert runner.estimate(None, View().note) == 1
    assert "no estimate: the job could not be described (ValueError: no)" in capsys.readouterr().out
    assert runner.screen(runner.baseline) is None
    assert runner.hints([]).predict(runner.baseline).peak_gib is None
    assert runner.advice([]) == ""


def test_an_estimate_of_what_is_no_job_is_bad_input():
    runner = make(card="H100")
    runner.memory.facts = GivenFacts(None)
    runner.memory.facts.error = "TypeError: workload.factory=m:f: the model has no parameters"
    with pytest.raises(BadInputError, match=r"^workload.factory=m:f: the model has no parameters"):
        runner.estimate(None, View().note)
