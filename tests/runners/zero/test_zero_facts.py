"""Where facts of a job's tensors come from, and when an earlier answer is one."""

import json

import pytest

from perfsearch.runners.zero import memory
from perfsearch.runners.zero.memory import FACTS_FILE, FactsSource
from perfsearch.workloads.spec import WorkloadSpec

FACTORY = """
import torch
from torch import nn

def build():
    model = nn.Linear(4, {width})
    return model, [torch.ones(4)] * 8, lambda m, b: m(b).mean(), torch.optim.SGD
"""


def elements(workload, directory):
    source = FactsSource(workload, 0, "cpu", directory)
    try:
        facts = source.get()
    finally:
        source.close()
    assert facts is not None, source.error
    return sum(p.elements for p in facts.parameters)


def test_a_changed_factory_is_described_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    workload = WorkloadSpec("custom", "auto", factory="described_job:build", global_batch=8)
    for width in (8, 16000):
        (tmp_path / "described_job.py").write_text(FACTORY.format(width=width))
        assert elements(workload, tmp_path) == 5 * width


def test_the_same_question_on_a_built_in_job_is_asked_once(tmp_path, monkeypatch):
    workload = WorkloadSpec("mlp", "tiny", global_batch=8)
    known = elements(workload, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(memory.subprocess, "Popen", lambda *a, **k: pytest.fail("asked again"))
        assert elements(workload, tmp_path) == known
    kept = json.loads((tmp_path / FACTS_FILE).read_text())
    (tmp_path / FACTS_FILE).write_text(json.dumps({**kept, "key": "another"}))
    assert elements(workload, tmp_path) == known
