"""An optimizer that changes its implementation between two steps."""

import weakref

import pytest
import torch

from perfsearch.online.optimizer import ImplementationSwitch, why_not_switchable

MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


def train(make, choices):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = make(model.parameters())
    switch = ImplementationSwitch(optimizer)
    for step in range(12):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if choices:
            switch.apply(choices[step % len(choices)])
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer, switch


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_training_goes_on_as_it_was(make):
    plain, _, _ = train(make, [])
    switched, optimizer, switch = train(make, ["fused", "foreach", "default"])
    assert torch.allclose(plain, switched, rtol=1e-4, atol=1e-6)
    assert switch.choice == "default"
    assert not optimizer._step_supports_amp_scaling
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == (None, None)


def test_counts_of_steps_are_where_the_implementation_looks_for_them():
    _, optimizer, _ = train(MAKERS["adamw"], ["fused"])
    counts = [state["step"] for state in optimizer.state.values()]
    assert all(float(count) == 12 and count.dtype == torch.float32 for count in counts)
    assert optimizer._step_supports_amp_scaling


def test_the_users_own_choice_comes_back():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    switch = ImplementationSwitch(optimizer)
    switch.apply("foreach")
    assert not optimizer.param_groups[0]["fused"]
    switch.apply("default")
    assert optimizer.param_groups[0]["fused"] is True


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: Mine([p]), "Mine is not one of"),
        (lambda p: torch.optim.RMSprop([p]), "RMSprop is not one of"),
        (lambda p: torch.optim.Adam([p], capturable=True), "capturable"),
        (lambda p: torch.optim.Adam([p], differentiable=True), "differentiable"),
    ],
)
def test_what_cannot_change_says_why(make, reason):
    assert reason in why_not_switchable(make(torch.nn.Parameter(torch.ones(2))))


def test_plain_ones_can():
    assert why_not_switchable(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])) == ""
    whole = torch.nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    assert "floating-point" in why_not_switchable(torch.optim.SGD([whole]))


def test_an_optimizer_lives_no_longer_than_the_script_wants_it():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    switch, kept = ImplementationSwitch(optimizer), weakref.ref(optimizer)
    del optimizer
    assert kept() is None
    switch.apply("foreach")
    assert switch.choice == "foreach"
