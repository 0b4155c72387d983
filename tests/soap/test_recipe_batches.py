"""Batches of other shapes than the captured one are refused: a part of them would be computed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.executor.exchange import Communicators
from perfsearch.soap.executor.execute import BatchError, Execution
from perfsearch.soap.plan import data_parallel
from perfsearch.soap.recipe import captured_of
from perfsearch.workloads.base import Job

CPU = torch.device("cpu")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.leave = nn.Linear(4, 3)

    def forward(self, words):
        return self.leave(self.table(words).mean(1))


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(length, kind=torch.int64):
    return torch.ones(4, length, dtype=kind), torch.zeros(4, dtype=torch.int64)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Communicators(CPU)
    dist.destroy_process_group()


def test_a_batch_of_another_shape_is_refused_in_its_step(alone):
    model = Words()
    captured = capture(model, loss, batch_of(5))
    plan = data_parallel(captured.graph, range(1))
    execution = Execution(captured, plan, model, CPU, alone)
    expected = loss(model, batch_of(5)).item()
    assert execution.step(batch_of(5)).item() == pytest.approx(expected)
    for other in (batch_of(7), batch_of(4), batch_of(5, torch.int32)):
        with pytest.raises(BatchError, match=r"captured for.*one shape"):
            execution.step(other)


def padded(samples):
    longest = max(len(words) for words, _ in samples)
    words = [functional.pad(words, (0, longest - len(words))) for words, _ in samples]
    return torch.stack(words), torch.stack([label for _, label in samples])


def test_a_collate_function_that_pads_as_far_as_needed_is_refused_at_once():
    data = [(torch.ones(3 + i % 4, dtype=torch.int64), torch.tensor(0)) for i in range(8)]
    job = Job(Words(), data, loss, lambda p: torch.optim.SGD(p, lr=0.1), collate=padded)
    with pytest.raises(CaptureError, match=r"samples of \[3\] and of \[6\].*fixed length"):
        captured_of(job, 4, CPU)
    with pytest.raises(CaptureError, match="cannot be put together"):
        captured_of(Job(Words(), data, loss, job.optimizer), 4, CPU)
