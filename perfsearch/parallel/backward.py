"""The backward pass, its own work told from the communication that nothing overlaps."""

from __future__ import annotations

import torch

from perfsearch.parallel.base import Mark


def run_backward(loss: torch.Tensor, mark: Mark, split: bool) -> None:
    """Run it, and mark ``backward``; with ``split`` its end of computing, then ``comm_exposed``.

    DistributedDataParallel waits for its all-reduces in a callback at the end of the backward pass,
    which it registers with the last gradient. One that is registered with the first gradient runs
    before it, when everything is computed (on a GPU: queued on the stream that then waits).
    """
    if not split:
        loss.backward()
        mark("backward")
        return

    def at_first_gradient(gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: mark("backward"))

    loss.register_hook(at_first_gradient)
    loss.backward()
    mark("comm_exposed")
