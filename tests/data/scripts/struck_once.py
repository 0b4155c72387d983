"""Is ended by somebody else in its first start, before it trains; later ones are left alone."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

struck = Path(sys.argv[1])
if not struck.exists():
    struck.touch()
    os.kill(os.getpid(), signal.SIGKILL)
net = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=16):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
