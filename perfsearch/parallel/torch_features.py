"""What the installed torch can do, found without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

_WRAPPER = "nn/parallel/distributed.py"


def torch_version() -> str:
    """Version of the installed torch; empty where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def nccl_version() -> str:
    """Version of the NCCL package that torch brought; empty where there is none."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower().startswith("nvidia-nccl"):
            return distribution.version
    return ""


@functools.cache
def wrapper_parameters() -> frozenset[str]:
    """Parameter names of ``DistributedDataParallel.__init__``, read from its source."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / _WRAPPER
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "DistributedDataParallel":
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    arguments = member.args
                    return frozenset(a.arg for a in (*arguments.args, *arguments.kwonlyargs))
    return frozenset()
