"""What is advised on findings: the records, and what is made of them."""

import ast
import inspect

import pytest

from perfsearch import knobs
from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Kind, Knob, Numerics
from perfsearch.core.space import Constraint, Space
from perfsearch.knobs.base import Job, Use
from perfsearch.knobs.ddp import constructor_records
from perfsearch.metrics import advice, diagnosis
from perfsearch.metrics.advice import ADVICE, Turn, on, proposals, sentences
from perfsearch.metrics.slow_steps import Cause

WORKERS = Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1, 2, 4, 8))
PREFETCH = Knob(
    "prefetch_factor", Kind.ORDINAL, 2, (2, 4, 8), when={"dataloader_workers": (1, 2, 4, 8)}
)
SPACE = Space([WORKERS, PREFETCH, Knob("pin_memory", Kind.BOOLEAN, False)])
TODAY = {"dataloader_workers": 0, "prefetch_factor": 2, "pin_memory": False}
LOADING = {"input_bound": ["unknown"]}


def names_of_findings():
    """Those that the diagnosis can come to, by its text."""
    tree = ast.parse(inspect.getsource(diagnosis))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    made = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "Finding"]
    return {c.args[0].value for c in made}


# -----------------------------------------------------------------------------
# The records.


def test_every_finding_has_advice_and_nothing_is_advised_on_others():
    assert {name for one in ADVICE for name in one.findings} == names_of_findings()


def test_every_cause_is_one_that_a_finding_can_have():
    of_rules = {"disk", "network", "processors", "other jobs", "unknown", "device", "data"}
    known = {"", "loaders", "unprofiled", *of_rules, *Cause}
    assert {one.cause for one in ADVICE} <= known
    assert set(Cause) <= {one.cause for one in ADVICE}, "each cause of slow steps has a sentence"


def test_a_gain_names_who_saw_it():
    assert [one.do for one in ADVICE if one.gain and not one.source] == []
    assert any(one.gain for one in ADVICE)


def test_what_a_knob_does_to_the_result_is_said_by_its_record_alone():
    assert [one.do for one in ADVICE if one.knob is not None and one.alters is not None] == []
    attention = next(one for one in ADVICE if one.to == "cudnn")
    assert attention.numerics is Numerics.REORDERED


def test_every_value_is_one_that_some_job_has():
    machines = [
        Hardware(device, nproc=8, nnodes=1, gpus=(), cores=64) for device in ("cuda", "cpu")
    ]
    takes = frozenset(record.parameter for record in constructor_records())
    jobs = [
        Job(machine, {}, takes, threads=4, convolutional=True, attends=True, repeats=True, use=use)
        for machine in machines
        for use in (Use.DDP, Use.ZERO)
    ]
    for one in ADVICE:
        if one.knob is None:
            continue
        assert one.knob is knobs.by_name[one.knob.name]
        made = [one.knob.declare(job) for job in jobs]
        there = [knob for knob in made if isinstance(knob, Knob)]
        if isinstance(one.to, Turn):
            assert any(knob.is_ordered for knob in there), one.knob.name
        else:
            assert any(knob.contains(one.to) for knob in there), one.knob.name


# -----------------------------------------------------------------------------
# For people.


def test_a_sentence_is_made_of_what_is_advised():
    assert sentences("cpu_quota") == (
        "Raise the quota, or start fewer threads and loader processes than it has processors for."
    )
    assert sentences("input_bound", ["disk"]) == (
        "Keep the data on a faster disk or in memory, or read it in larger pieces."
    )


def test_each_cause_has_its_own_sentence_and_equal_ones_are_said_once():
    text = sentences("uneven_steps", [Cause.SAVING, Cause.BACKWARD, Cause.UNKNOWN])
    assert text == (
        "Save less often, or in the background (torch.distributed.checkpoint). "
        "Look at what happens in those steps."
    )


def test_a_finding_without_its_cause_says_nothing_rather_than_something_wrong():
    assert sentences("input_bound") == ""


# -----------------------------------------------------------------------------
# For strategies.


def test_all_together_comes_first_and_then_each_alone():
    points = proposals(LOADING, SPACE, TODAY)
    assert points == [
        {"dataloader_workers": 2, "prefetch_factor": 4, "pin_memory": False},
        {"dataloader_workers": 2, "prefetch_factor": 2, "pin_memory": False},
    ]  # and not the prefetch factor alone, which does not matter without workers


def test_the_bottleneck_decides_where_two_findings_turn_one_knob():
    quota_first = {"cpu_quota": [], "input_bound": ["unknown"]}
    today = {**TODAY, "dataloader_workers": 4}
    assert proposals(quota_first, SPACE, today)[0]["dataloader_workers"] == 2
    loading_first = {"input_bound": ["unknown"], "cpu_quota": []}
    assert proposals(loading_first, SPACE, today)[0]["dataloader_workers"] == 8


def test_a_second_value_of_a_knob_is_tried_alone():
    modes = ("none", "default", "max-autotune", "reduce-overhead")
    space = Space([Knob("compile_mode", Kind.CATEGORICAL, "none", modes)])
    points = proposals({"launch_bound": []}, space, {"compile_mode": "none"})
    assert [point["compile_mode"] for point in points] == ["default", "reduce-overhead"]


def test_new_shapes_are_met_by_kernels_that_plan_nothing_and_by_nothing_that_compiles():
    space = Space(
        [
            Knob("compile_mode", Kind.CATEGORICAL, "none", ("none", "default")),
            Knob(
                "attention_backend", Kind.CATEGORICAL, None, (None, "flash", "efficient", "cudnn")
            ),
        ]
    )
    today = {"compile_mode": "none", "attention_backend": None}
    points = proposals({"new_shapes": []}, space, today)
    assert [point["attention_backend"] for point in points] == ["efficient", "flash"]
    assert {point["compile_mode"] for point in points} == {"none"}


def test_a_turn_ends_where_the_values_end():
    today = {**TODAY, "dataloader_workers": 8, "prefetch_factor": 8}
    assert proposals(LOADING, SPACE, today) == []
    assert proposals({"cpu_quota": []}, SPACE, TODAY) == []


def test_what_may_not_be_tried_is_not_proposed():
    few = Constraint("few", lambda c: c["dataloader_workers"] * c["prefetch_factor"] < 8)
    points = proposals(LOADING, Space(SPACE.knobs, [few]), TODAY)
    assert points == [{"dataloader_workers": 2, "prefetch_factor": 2, "pin_memory": False}]
    assert proposals(LOADING, SPACE, TODAY, without={"dataloader_workers"}) == []


def test_a_value_that_a_job_does_not_have_is_not_proposed():
    knob = Knob("attention_backend", Kind.CATEGORICAL, None, (None, "math"))
    space = Space([knob])
    assert proposals({"compute_bound": []}, space, {"attention_backend": None}) == []


@pytest.mark.parametrize("found", [{}, {"balanced": []}, {"of another version": ["x"]}])
def test_nothing_is_proposed_where_nothing_is_known(found):
    assert proposals(found, SPACE, TODAY) == []


def test_programs_are_told_plain_values():
    told = [one.to_plain() for one in on(LOADING)]
    assert [t["knob"] for t in told] == ["dataloader_workers", "prefetch_factor"]
    assert told[0]["to"] == "more" and told[0]["numerics"] == "exact"
    assert told[0]["gain"] and told[0]["source"] and told[0]["trap"]
    assert advice.Turn.MORE.value == "more"
