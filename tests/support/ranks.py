"""Starts ranks as forks of one process that has imported torch, the same for all tests."""

import torch.multiprocessing

_PRELOADED = [
    "torch",
    "torch._dynamo",  # which DistributedDataParallel, fully_shard and torch.export import
    "torch.distributed.fsdp",
    "torch.export",
]


def start(run, arguments, nprocs):
    """Have ``run`` be called with the number of a rank and the arguments; wait for their end.

    Raises:
        torch.multiprocessing.ProcessException: one of them failed.

    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    torch.multiprocessing.start_processes(run, arguments, nprocs, start_method="forkserver")
