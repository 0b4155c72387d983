import pytest
import torch

from perfsearch.knobs.optimizer import apply_implementation, implementation_of


def parameters():
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("choice", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_implementations_take_the_same_step(choice, kind):
    results = []
    for implementation in ("default", choice):
        own = parameters()
        optimizer = kind(own, lr=0.1)
        apply_implementation(optimizer, implementation)
        assert implementation_of(optimizer) == implementation
        for p in own:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        results.append(own)
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def test_a_class_without_it_is_refused_by_name():
    with pytest.raises(ValueError, match=r"fused: LBFGS has no fused"):
        apply_implementation(torch.optim.LBFGS(parameters()), "fused")


def test_unknown_name():
    with pytest.raises(ValueError, match="optimizer_implementation=quick: one of default"):
        apply_implementation(torch.optim.SGD(parameters()), "quick")


def test_default_leaves_what_the_user_made():
    optimizer = torch.optim.SGD(parameters(), fused=True)
    apply_implementation(optimizer, "default")
    assert implementation_of(optimizer) == "fused"
