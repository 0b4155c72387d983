"""What is to be trained, as plain values. The controller reads this; it imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import nearest

AUTO = "auto"

SCRIPT = "script"
"""The user's own unchanged script, which ``perfsearch.runners._script`` runs."""

_SMALL_GPU_GIB = 16.0


@dataclass(frozen=True)
class Traits:
    """What the controller must know of a built-in workload.

    Attributes:
        samples_per_rank: default share of a rank by size; the global batch follows from it.
        auto_cpu: the size that ``auto`` stands for on a CPU.
        auto_gpu: the same on a GPU of at least 16 GiB; a smaller one takes ``auto_cpu``.
        options: ``workload.*`` keys of this workload alone.
        convolutional: whether image layouts and cuDNN's search for algorithms matter.
        attends: whether the model calls ``scaled_dot_product_attention``.
        repeats: whether the model repeats blocks, such as the layers of a transformer.
        draws_in_loader: whether loading draws random numbers, so that the number of loader
            processes changes what is trained.

    """

    samples_per_rank: Mapping[str, int]
    auto_cpu: str
    auto_gpu: str
    options: frozenset[str] = frozenset()
    convolutional: bool = False
    attends: bool = False
    repeats: bool = False
    draws_in_loader: bool = False


TRAITS: dict[str, Traits] = {
    "gpt": Traits(
        {"tiny": 4, "small": 8, "medium": 4, "large": 4},
        "tiny",
        "small",
        frozenset({"sequence_length", "vocabulary", "layers", "width", "heads"}),
        attends=True,
        repeats=True,
    ),
    "resnet": Traits(
        {"tiny": 16, "resnet18": 32, "resnet50": 64},
        "tiny",
        "resnet50",
        frozenset({"image_size", "classes"}),
        convolutional=True,
        repeats=True,
    ),
    "dlrm": Traits(
        {"tiny": 128, "small": 2048},
        "tiny",
        "small",
        frozenset({"tables", "rows", "embedding_width"}),
    ),
    "mlp": Traits(
        {"tiny": 64, "small": 256}, "tiny", "small", frozenset({"layers", "width", "inputs"})
    ),
    "custom": Traits(
        {"custom": 8},
        "custom",
        "custom",
        frozenset({"convolutional", "attends", "repeats", "draws_in_loader"}),
        draws_in_loader=True,
    ),
}


@dataclass(frozen=True)
class WorkloadSpec:
    """The ``workload.*`` keys.

    Attributes:
        name: a built-in workload, or ``custom``.
        size: one of its sizes, or ``auto``: chosen from the hardware.
        global_batch: samples a step over all ranks; ``None``: the size's own times the ranks.
        samples_per_step: samples that throughput counts for a step; ``None``: the global batch.
        factory: ``module:function`` of a custom workload.
        options: keys of this workload alone; ``None`` leaves one to the size.

    """

    name: str = "gpt"
    size: str = AUTO
    global_batch: int | None = None
    samples_per_step: int | None = None
    factory: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> WorkloadSpec:
        """Split the ``workload`` group of a config into common and particular keys."""
        common = {f.name for f in fields(cls)} - {"options"}
        known = {k: v for k, v in values.items() if k in common}
        return cls(**known, options={k: v for k, v in values.items() if k not in common})

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are set; the size decides on the others."""
        return {k: v for k, v in self.options.items() if v is not None}

    @property
    def traits(self) -> Traits:
        """What the controller must know of it.

        Raises:
            ValueError: there is no such workload.

        """
        if self.name not in TRAITS:
            raise ValueError(f"workload.name={self.name}: unknown. {nearest(self.name, TRAITS)}")
        traits = TRAITS[self.name]
        if self.name == "custom":
            traits = replace(
                traits,
                convolutional=bool(self.options.get("convolutional")),
                attends=bool(self.options.get("attends")),
                repeats=bool(self.options.get("repeats")),
                draws_in_loader=self.options.get("draws_in_loader") is not False,
            )
        return traits

    def resolve(self, device: str, memory_gib: float | None, world_size: int) -> WorkloadSpec:
        """Settle ``auto`` and the batch for the hardware, and check everything that can be.

        Args:
            device: ``cpu`` or ``cuda``.
            memory_gib: of the smallest device used.
            world_size: ranks over all nodes.

        Raises:
            ValueError: a key has a value that cannot work; the message names it.

        """
        traits = self.traits
        for key in self.options:
            if key not in traits.options:
                allowed = {f.name for f in fields(self)} - {"options"} | traits.options
                near = nearest(key, allowed, "workload")
                raise ValueError(f"workload.{key}: unknown to {self.name}. {near}")
        size = self.size
        if size == AUTO or self.name == "custom":
            roomy = device == "cuda" and (memory_gib or 0) >= _SMALL_GPU_GIB
            size = traits.auto_gpu if roomy else traits.auto_cpu
        if size not in traits.samples_per_rank:
            allowed = {*traits.samples_per_rank, AUTO}
            raise ValueError(f"workload.size={size}: unknown. {nearest(size, allowed)}")
        batch = self.global_batch
        if batch is None:
            batch = traits.samples_per_rank[size] * world_size
        if batch < world_size or batch % world_size:
            below, above = batch // world_size * world_size, -(-batch // world_size) * world_size
            near = f"{world_size}" if batch < world_size else f"{below} or {above}"
            raise ValueError(
                f"workload.global_batch={batch}: {world_size} ranks cannot share it evenly. "
                f"Nearest possible: {near}."
            )
        if self.samples_per_step is not None and self.samples_per_step < 1:
            raise ValueError(
                f"workload.samples_per_step={self.samples_per_step}: must be at least 1, or null "
                "for the global batch"
            )
        if self.name == "custom":
            check_factory(self.factory)
        elif self.factory is not None:
            raise ValueError(f"workload.factory={self.factory}: only workload=custom has a factory")
        return replace(self, size=size, global_batch=batch, options=dict(self.options))


def check_factory(factory: str | None) -> None:
    """See that ``module:function`` names something, without running any of it.

    Raises:
        ValueError: it does not; the message says what is missing where.

    """
    if not factory:
        raise ValueError(
            "workload.factory: workload=custom needs the function that makes your job. Set "
            "workload.factory=MODULE:FUNCTION, for instance my_package.train:build"
        )
    key = f"workload.factory={factory}"
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", factory):
        raise ValueError(f"{key}: give it as module:function, for instance my_package.train:build")
    module_name, _, function = factory.partition(":")
    source = _module_source(module_name)
    if source is None:
        raise ValueError(
            f"{key}: there is no module {module_name!r} in the current directory ({Path.cwd()}) or "
            "among the installed packages"
        )
    if source.suffix != ".py":
        return  # compiled, or a namespace: only importing it can tell
    names = _top_level_names(source, key)
    if function not in names and "*" not in names:
        raise ValueError(f"{key}: {source} defines no {function!r}. {nearest(function, names)}")


def _module_source(module_name: str) -> Path | None:
    """Find a module's file as ranks will, the current directory first; run no package of it."""
    *packages, last = module_name.split(".")
    search: list[str] | None = None
    here = Path.cwd()
    for package in packages:
        spec = _find(package, search, here)
        if spec is None or spec.submodule_search_locations is None:
            return None
        search = list(spec.submodule_search_locations)
    spec = _find(last, search, here)
    if spec is None:
        return None
    return Path(spec.origin) if spec.origin else Path(last)


def _find(name: str, search: list[str] | None, here: Path) -> Any:
    from importlib.machinery import PathFinder

    if search is not None:
        return PathFinder.find_spec(name, search)
    return PathFinder.find_spec(name, [str(here)]) or importlib.util.find_spec(name)


def _top_level_names(source: Path, key: str) -> set[str]:
    import ast

    try:
        tree = ast.parse(source.read_text(), filename=str(source))
    except SyntaxError as error:
        raise ValueError(f"{key}: {source} line {error.lineno}: {error.msg}") from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update((alias.asname or alias.name) for alias in node.names)
    return names
