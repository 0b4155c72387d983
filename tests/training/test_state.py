import random

import torch

from perfsearch.training.state import GlobalSwitches, Snapshot, packed, seed_everything


def test_a_snapshot_restores_values_layout_flags_and_gradients():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model[0].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    snapshot = Snapshot(model)
    pointers = list(model.parameters())
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    model.eval()
    model[0].bias.requires_grad_(True)
    snapshot.restore(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == before[name].stride()
    assert all(left is right for left, right in zip(model.parameters(), pointers, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not model[0].bias.requires_grad


def test_tied_weights_stay_tied():
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, 2), "b": torch.nn.Linear(2, 4, False)})
    model["b"].weight = model["a"].weight
    snapshot = Snapshot(model)
    with torch.no_grad():
        model["a"].weight.add_(1)
    snapshot.restore(model)
    assert model["b"].weight is model["a"].weight


def test_switches_are_put_back():
    found = GlobalSwitches.read()
    torch.backends.cudnn.benchmark = not found.cudnn_benchmark
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(found.threads + 1)
    torch.backends.cuda.enable_flash_sdp(False)
    found.restore()
    assert GlobalSwitches.read() == found


def test_seeds():
    seed_everything(5)
    one = (random.random(), torch.rand(1).item())
    seed_everything(5)
    assert (random.random(), torch.rand(1).item()) == one


def test_packed_tensors_equal_their_originals_whatever_their_layout(monkeypatch):
    monkeypatch.setattr("perfsearch.training.state._CHUNK_BYTES", 4096)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    tensors = {
        "weight": torch.randn(5, 7),
        "image": image,
        "wide": torch.randn(64, 64),  # larger than a chunk
        "expanded": torch.randn(4, 1).expand(4, 3),
        "scalar": torch.tensor(3),
        "half": torch.randn(3).half(),
        "empty": torch.empty(0),
    }
    copies = packed(tensors, pin=False)
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor), name
        assert copies[name].stride() == torch.empty_like(tensor).stride()
        assert copies[name].dtype == tensor.dtype
        assert copies[name].data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_a_model_that_leaves_the_host_is_not_copied():
    model = torch.nn.Linear(3, 2)
    snapshot = Snapshot(model, to_gpu=True)
    kept = snapshot.values_of(model)[id(model.weight)]
    assert kept.data_ptr() == model.weight.data_ptr()
