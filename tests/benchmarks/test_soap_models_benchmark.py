"""What the benchmark of public models calls right, and what it writes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soap_models
from _soap_model_cases import CASES, LOSSES
from _store import Store


def record(**values):
    return {"errors": [1e-12] * 4, "single": False, "amplified": 1e-15, **values}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "right"),
        ({"errors": [1e-12, 1e-5, 0.0, 0.0]}, "wrong"),
        ({"errors": [1e-12, 1e-5, 0.0, 0.0], "single": True}, "right"),
        ({"errors": [float("nan")] * 4}, "wrong"),
        ({"errors": [1e-6] * 4, "amplified": 1e-7}, "right"),
        ({"errors": [0.1] * 4, "amplified": 1e-7}, "wrong"),
        ({"errors": [0.1] * 4, "amplified": 0.1}, "unclear"),
        ({"refused": "no"}, "refused"),
        ({"crashed": "KeyError"}, "crashed"),
        ({"errors": [], "failed": "no answer"}, "failed"),
    ],
)
def test_right_is_what_rounding_explains(values, word):
    assert soap_models.verdict(record(**values)) == word


def test_the_page_has_a_row_for_each_in_the_order_of_the_cases(tmp_path):
    store = Store(tmp_path / "records.jsonl")
    shown = {"left": 0.11, "operators": 7, "causes": [["drop", "dropout", 0.11]], "failed": ""}
    store.add("model", CASES[1].key, **record(**shown))
    store.add("model", CASES[0].key, refused="complex numbers; write real ones; /a/b/model.py:7")
    lines = [line for line in soap_models.report(store).splitlines() if line.startswith("| t")]
    assert CASES[0].name in lines[0] and "refused: complex numbers; write real ones |" in lines[0]
    assert "| 7 | 11.0% |" in lines[1] and "right; dropout 11.0%" in lines[1]


def test_every_case_has_a_key_of_its_own_and_a_loss():
    assert len({case.key for case in CASES}) == len(CASES) >= 40
    assert {case.task for case in CASES} <= set(LOSSES)
    for case in CASES:
        assert all(len(leaf) == soap_models.BATCH for leaf in case.batch(0))
