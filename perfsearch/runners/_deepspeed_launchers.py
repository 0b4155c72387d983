"""The launchers that DeepSpeed jobs are started by, as far as their options must be understood."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """What must be known of a launcher's own options.

    Attributes:
        ranks: options that say how many processes to start here.
        nodes: options that say on how many nodes.
        port: option for the port of the rendezvous.
        has_port: options of which each already settles the port.
        flags: options without a value; every other one takes the next word.

    """

    ranks: tuple[str, ...]
    nodes: tuple[str, ...]
    port: str
    has_port: tuple[str, ...]
    flags: frozenset[str]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAUNCHERS = {
    "deepspeed": Launcher(
        ("--num_gpus", "--num_accelerators"),
        ("--num_nodes",),
        "--master_port",
        ("--master_port",),
        _words(
            "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi "
            "--save_pid --bind_cores_to_rank --quiet -q"
        ),
    ),
    "torchrun": Launcher(
        ("--nproc-per-node", "--nproc_per_node"),
        ("--nnodes",),
        "--master-port",
        ("--master-port", "--master_port", "--standalone", "--rdzv-endpoint", "--rdzv_endpoint"),
        _words("--standalone --module -m --no-python --no_python --run-path --run_path"),
    ),
    "accelerate": Launcher(
        ("--num_processes", "--num-processes"),
        ("--num_machines", "--num-machines"),
        "--main_process_port",
        ("--main_process_port", "--main-process-port"),
        _words(
            "--cpu --multi_gpu --multi-gpu --use_deepspeed --use-deepspeed --module -m "
            "--no_python --no-python --debug --quiet -q"
        ),
    ),
}

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
