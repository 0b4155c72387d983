"""What must be the same on each node of a search: versions, and variables that change a job."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any

from perfsearch.core import hardware
from perfsearch.core.hardware import Gpu
from perfsearch.core.version import version

_SHARED = re.compile(
    r"^(NCCL|TORCH|TORCHINDUCTOR|PYTORCH|GLOO|OMP|MKL|KMP|CUDA|CUBLAS|CUDNN|NVIDIA_TF32|UCX|FI)_"
    r"|^PYTHONHASHSEED$"
)
"""Variables by which torch and its libraries are told how to compute and to communicate."""

_OF_THE_NODE = re.compile(
    r"^CUDA_(VISIBLE_DEVICES|HOME|PATH|VERSION)|_SOCKET_IFNAME$|_NET_DEVICES$|^NCCL_(IB_HCA|HOSTID)$"
)
"""Those of them that name what a node has, and may differ."""


def shared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that each node must have alike; paths may differ."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _SHARED.match(name) and not _OF_THE_NODE.search(name) and not value.startswith("/")
    }


def versions(gpus: bool) -> dict[str, str]:
    """Versions on this node; those of NCCL and the driver where GPUs are used."""
    python = platform.python_version().rpartition(".")[0]
    found = {"perfsearch": version(), "torch": hardware.torch_version(), "Python": python}
    if gpus:
        found |= {"NCCL": hardware.nccl_version(), "driver": hardware.driver_version()}
    return found


def differences(
    theirs: Mapping[str, Any], own_versions: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """What of another node differs from this one, by name; empty where nothing does.

    A variable that is set here alone is no difference: the other node is given it.

    Args:
        theirs: ``versions`` and ``variables`` of the other.
        own_versions: of this one.
        environ: of this one.

    """
    found = [
        f"{name} {theirs['versions'].get(name) or 'missing'} there, {own or 'missing'} here"
        for name, own in own_versions.items()
        if theirs["versions"].get(name) != own
    ]
    for name, value in theirs["variables"].items():
        if environ.get(name) != value:
            here = f"{environ[name]} here" if name in environ else "not set here"
            found.append(f"{name}={value} there, {here}")
    return found


def too_few_gpus(theirs: list[Gpu], nproc: int) -> str:
    """Why a node has too few GPUs; empty where it has enough."""
    if len(theirs) >= nproc:
        return ""
    return f"{len(theirs)} GPUs are visible there, and nproc={nproc} needs as many"


def facts(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a node tells of itself."""
    gpus = [] if hardware.torch_version().endswith("+cpu") else hardware.visible_gpus()
    return {
        "versions": versions(bool(gpus)),
        "variables": shared_variables(os.environ if environ is None else environ),
        "gpus": [[gpu.uuid, gpu.name, gpu.memory_gib] for gpu in gpus],
    }
