import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from perfsearch.training.state import make_loader
from perfsearch.workloads.base import Job, as_job
from perfsearch.workloads.spec import WorkloadSpec


def built(name, seed=0, **options):
    from importlib import import_module

    spec = WorkloadSpec(name, size="tiny", options=options).resolve("cpu", None, 2)
    torch.manual_seed(seed)
    return import_module(f"perfsearch.workloads.{name}").build(spec, seed)


@pytest.mark.parametrize("name", ["gpt", "resnet", "dlrm", "mlp"])
def test_a_step_lowers_the_loss_of_its_batch(name):
    from perfsearch.training.base import LoaderOptions

    job = built(name)
    batch = next(iter(make_loader(job, LoaderOptions(4), 4, 0, 1, seed=0)))
    optimizer = job.optimizer(job.model.parameters())
    losses = []
    for _ in range(4):
        loss = job.loss(job.model, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert all(isinstance(block, torch.nn.Module) for block in job.blocks)
    assert job.blocks


@pytest.mark.parametrize("name", ["gpt", "resnet", "dlrm", "mlp"])
def test_the_same_seed_gives_the_same_job(name):
    one, two, other = built(name), built(name), built(name, seed=1)
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(_tensors(one.data[3]), _tensors(two.data[3]), strict=True):
        assert torch.equal(left, right)
    different = zip(_tensors(one.data[3]), _tensors(other.data[3]), strict=True)
    assert any(not torch.equal(left, right) for left, right in different)


def _tensors(sample):
    parts = sample if isinstance(sample, tuple) else (sample,)
    return [torch.as_tensor(part) for part in parts]


def test_gpt_ties_its_head_and_takes_options():
    job = built("gpt", layers=1, width=32, heads=2, vocabulary=64, sequence_length=8)
    assert job.model.head.weight is job.model.tokens.weight
    assert len(job.blocks) == 1
    assert job.tokens_per_sample == 8
    assert len(job.data[0]) == 9
    with pytest.raises(
        ValueError, match=r"workload.width=33: must be a multiple of workload.heads"
    ):
        built("gpt", width=33)


def test_the_example_is_a_job():
    import runpy
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / "custom_workload.py"
    job = as_job(runpy.run_path(str(path))["build"](), "example")
    batch = torch.utils.data.default_collate([job.data[i] for i in range(4)])
    assert job.loss(job.model, batch).isfinite()


def parts(**changes):
    model = torch.nn.Linear(2, 1)
    made = {
        "model": model,
        "data": TensorDataset(torch.ones(4, 2)),
        "loss": lambda model, batch: model(batch[0]).mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters),
        **changes,
    }
    return tuple(made.values())


def test_a_loader_is_taken_apart():
    def collate(samples):
        return samples

    data = TensorDataset(torch.ones(4, 2))
    job = as_job(parts(data=DataLoader(data, batch_size=2, collate_fn=collate)), "m:f")
    assert job.data is data
    assert job.collate is collate


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, r"workload.factory=m:f returned NoneType; it must return"),
        (parts(model=3), "model must be a torch.nn.Module"),
        (parts(model=torch.nn.ReLU()), "m:f: the model has no parameters, so there is nothing to"),
        (parts(data=Endless()), "data must be a map-style Dataset"),
        (parts(loss=3), "loss must be callable"),
        (
            parts(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
            "optimizer must be callable",
        ),
    ],
)
def test_other_things_are_refused(made, message):
    with pytest.raises(TypeError, match=message):
        as_job(made, "m:f")


def test_a_job_passes_through():
    job = Job(*parts())
    assert as_job(job, "m:f") is job
