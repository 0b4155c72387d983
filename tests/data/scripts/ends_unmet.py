"""Finds that it cannot train here, says so, and ends well."""

import sys
from pathlib import Path

import torch

if not Path(sys.argv[-1]).with_suffix(".photos").exists():
    print("Needs photos to train on, and there are none.")
    sys.exit()
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
