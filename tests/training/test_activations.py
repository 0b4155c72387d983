"""Activations counted on ``meta`` against those of a real step on the CPU."""

import json

import pytest
import torch
from torch import nn

from perfsearch.metrics.memory import MemoryFacts
from perfsearch.training.checkpointing import CheckpointedBlocks
from perfsearch.training.memory_probe import (
    _LiveBytes,
    describe_job,
    parameters_on_meta,
    peak_bytes,
)
from perfsearch.workloads import gpt, mlp, resnet
from perfsearch.workloads.base import Job, copy_job, empty_on
from perfsearch.workloads.spec import WorkloadSpec

BUILDERS = {"gpt": gpt, "mlp": mlp, "resnet": resnet}


def make(name, **options):
    torch.manual_seed(0)
    return BUILDERS[name].build(WorkloadSpec(name, "tiny", options=options), 0)


def really(job, micro_batch, every):
    """The same count with real tensors: the storages that a real step brings into being."""
    batch = torch.utils.data.default_collate([job.data[0]] * micro_batch)
    parts = batch if isinstance(batch, list | tuple) else [batch]
    for parameter in job.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    blocks = CheckpointedBlocks(job.blocks, every)
    counter = _LiveBytes([*job.model.parameters(), *job.model.buffers(), *parts])
    with counter:
        job.loss(job.model, batch).backward()
    blocks.undo()
    return counter.peak


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_the_count_without_storage_is_that_of_a_real_step(name, every):
    for micro_batch in (4, 16):
        expected = peak_bytes(make(name), micro_batch, every, "none", None)
        assert expected == pytest.approx(really(make(name), micro_batch, every), rel=0.05)


def test_checkpointing_and_lower_precision_need_less():
    job = make("gpt")
    plain = peak_bytes(job, 8, 0, "none", None)
    assert peak_bytes(job, 8, 1, "none", None) < 0.7 * plain
    cast = peak_bytes(job, 8, 0, "autocast", torch.bfloat16)
    assert peak_bytes(job, 8, 0, "policy", torch.bfloat16) < cast < plain


def test_attention_needs_no_matrix_of_scores():
    """Twice the sequence is twice the memory, not four times."""
    short, long = (
        peak_bytes(make("gpt", sequence_length=n), 4, 0, "none", None) for n in (256, 512)
    )
    assert long == pytest.approx(2 * short, rel=0.1)


NORMS = 5


@pytest.mark.parametrize(
    ("cast", "saved"),
    [(False, NORMS), (True, 3 * NORMS)],
    ids=["its kernel", "other dtypes, composed"],
)
def test_a_root_mean_square_norm_saves_its_input_alone_where_gpus_have_a_kernel(cast, saved):
    """Of weights in another precision torch makes a composition, which saves what it makes."""
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this torch has no such kernel")
    model = nn.Sequential(*(nn.RMSNorm(32) for _ in range(NORMS)))
    if cast:
        model.double()
    job = Job(model, Vectors(), lambda m, b: m(b).mean(), torch.optim.SGD)
    tensor = 64 * 32 * 4
    counted = peak_bytes(job, 64, 0, "none", None) / tensor
    assert counted > saved if cast else saved < counted < saved + 2


def test_facts_are_the_same_without_initial_values():
    with parameters_on_meta():
        bare = gpt.build(WorkloadSpec("gpt", "tiny"), 0)
    assert all(p.is_meta for p in bare.model.parameters())
    assert describe_job(bare, "cuda") == describe_job(make("gpt"), "cuda")
    assert not next(make("gpt").model.parameters()).is_meta


class Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((32,), float(index))


def by_line(job, micro_batch):
    facts = MemoryFacts.from_json(json.loads(json.dumps(describe_job(job, "cpu"))))
    assert facts.activation_error == ""
    return sum(facts.activation_bytes("none", 0, micro_batch))


def test_a_model_that_refuses_one_sample_is_counted_with_more():
    """Batch normalisation of vectors needs two."""
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    job = Job(model, Vectors(), lambda m, b: m(b).mean(), torch.optim.SGD)
    for micro_batch in (3, 64):
        counted = peak_bytes(job, micro_batch, 0, "none", None)
        assert by_line(job, micro_batch) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("micro_batch", [2, 64, 1024])
def test_growth_is_known_of_small_and_of_large_micro_batches(micro_batch):
    """With few samples a gradient of the first matrix is the most, with many activations are."""
    model = nn.Sequential(nn.Linear(32, 512), nn.Dropout(), nn.ReLU(), nn.Linear(512, 1))
    job = Job(model, Vectors(), lambda m, b: m(b).square().mean(), torch.optim.SGD)
    counted = peak_bytes(job, micro_batch, 0, "none", None)
    assert by_line(job, micro_batch) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_no_kind_of_step_grows_otherwise_than_predicted(name):
    """Also where large micro-batches were not counted, as they could not differ."""
    job = make(name)
    facts = MemoryFacts.from_json(json.loads(json.dumps(describe_job(job, "cuda"))))
    assert facts.activations
    for kind in facts.activations:
        precision, every = kind.split("/")
        dtype = None if precision == "none" else torch.bfloat16
        counted = peak_bytes(job, 200, int(every), precision, dtype)
        predicted = sum(facts.activation_bytes(precision, int(every), 200))
        assert predicted == pytest.approx(counted, rel=0.1), kind


def test_frozen_tied_and_half_parameters_are_told_apart():
    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)]
    layers[1].weight = layers[0].weight
    layers[2].requires_grad_(False)
    layers[2].half()
    job = Job(nn.Sequential(*layers), [0], lambda m, b: None, torch.optim.AdamW, blocks=layers[2:])
    facts = describe_job(job, "cpu")
    assert [tuple(p.values()) for p in facts["parameters"]] == [
        ([4, 4], 4, True, -1), ([4, 4], 2, False, 0), ([4], 2, False, 0)
    ]  # fmt: skip
    assert facts["optimizer_bytes"] == {"4": 8.0}
    assert facts["activations"] == facts["activations_large"] == {}
    assert facts["activation_error"]


def test_a_copy_shares_what_the_model_shares_and_no_values():
    job = make("gpt")
    copied = copy_job(job, empty_on("cpu"))
    assert copied.model.head.weight is copied.model.tokens.weight
    assert copied.model.tokens.weight is not job.model.tokens.weight
    assert copied.blocks == list(copied.model.blocks)
    assert copied.data is job.data
    copied.model.load_state_dict(job.model.state_dict())
    tokens = job.data[0][None]
    assert torch.equal(job.loss(job.model, tokens), job.loss(copied.model, tokens))


def test_what_cannot_be_copied_is_refused():
    class Special(nn.Parameter):
        pass

    model = nn.Module()
    model.weight = Special(torch.ones(2))
    with pytest.raises(TypeError, match="a parameter is a Special"):
        copy_job(Job(model, [0], lambda m, b: None, torch.optim.SGD), empty_on("cpu"))
    outside = Job(nn.Linear(2, 2), [0], lambda m, b: None, torch.optim.SGD, blocks=[nn.ReLU()])
    with pytest.raises(ValueError, match="blocks must be modules of its model"):
        copy_job(outside, empty_on("cpu"))


def test_checkpointed_blocks_compute_the_same_gradients_and_can_be_undone():
    plain, checked = make("gpt"), make("gpt")
    blocks = CheckpointedBlocks(checked.blocks, 1)
    assert blocks.every == 1
    tokens = torch.stack([plain.data[i] for i in range(2)])
    for job in (plain, checked):
        job.loss(job.model, tokens).backward()
    for one, other in zip(plain.model.parameters(), checked.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    blocks.undo()
    assert all("forward" not in vars(block) for block in checked.blocks)
