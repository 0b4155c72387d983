"""Weights that are changed by as little as they are rounded."""

import pytest
import torch

from perfsearch.training.rounding import perturb


@pytest.mark.parametrize(
    ("dtype", "autocast", "step"),
    [
        (torch.float64, (), 2.0**-53),
        (torch.float32, (), 2.0**-24),
        (torch.float32, (torch.bfloat16,), 2.0**-8),
    ],
)
def test_each_is_changed_by_about_half_a_step_of_the_coarsest_type(dtype, autocast, step):
    weights = torch.linspace(1.0, 2.0, 4096, dtype=dtype)
    changed, again = weights.clone(), weights.clone()
    perturb(changed, 3, autocast)
    perturb(again, 3, autocast)
    relative = ((changed - weights) / weights).abs()
    assert 0 < relative.max() < 10 * step
    assert torch.equal(changed, again)
    perturb(again, 4, autocast)
    assert not torch.equal(changed, again)
