"""What was seen of a script: what it builds, and what of that can be changed. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.knobs import names_of_taker
from perfsearch.knobs.base import Taker
from perfsearch.knobs.loader import WORKERS

_FILE = "facts.json"


@dataclass
class Facts:
    """What a script has built so far, as read back from the objects themselves.

    Attributes:
        wrappers: names of the data-parallel wrappers: ``ddp``, ``fully_shard``, ``fsdp1``,
            ``deepspeed``.
        loaders: number of loaders that were made.
        optimizers: class names of the optimizers that were made.
        values: knob name to the value that is in force.
        ignored: knob name to why a value that was asked for is not in force.
        draws_in_loader: whether loading was seen to draw random numbers; ``None``: unknown.
        draws_in_forward: whether torch drew random numbers between a loader's batch and the
            backward pass; ``None``: unknown.
        compiled: whether the script has compiled any of it.
        backend: of the process group, empty where there is none.
        framework: ``hf-trainer``, ``lightning``, ``accelerate``, ``deepspeed``, or empty.
        loss_dtype: of the losses that were seen, such as ``bfloat16``; empty before the first.
        accumulates: whether gradients were accumulated without being reduced (``no_sync``).
        shared_out: whether an ``IterableDataset`` is loaded from, whose samples several worker
            processes share out among each other, each number of them in its own way.
        implementations: implementations that its optimizers have;
            ``None``: not known.
        parameters: numbers that its optimizers train on this rank.
        convolutional: whether its backward pass goes through convolutions; ``None``: not known.
        modules: number of the outermost modules that it trains; 0 before its first step.
        images: whether they have convolutions over images; ``None``: not known.
        blocks: how many blocks of one class they repeat; ``None``: not known.
        attention: what computes scaled dot-product attention, other than plainly, such as
            ``flash``; ``None``: not known.

    """

    wrappers: list[str] = field(default_factory=list)
    loaders: int = 0
    optimizers: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    draws_in_loader: bool | None = None
    draws_in_forward: bool | None = None
    compiled: bool = False
    backend: str = ""
    framework: str = ""
    loss_dtype: str = ""
    accumulates: bool = False
    shared_out: bool = False
    implementations: list[str] | None = None
    parameters: int | None = None
    convolutional: bool | None = None
    modules: int = 0
    images: bool | None = None
    blocks: int | None = None
    attention: list[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def leave(self, directory: str | Path) -> None:
        """Write them where the controller looks when the script has failed."""
        (Path(directory) / _FILE).write_text(json.dumps(self.to_json()))

    @classmethod
    def left(cls, directory: str | Path) -> Facts | None:
        """What ``leave`` wrote; ``None`` where nothing was left."""
        file = Path(directory) / _FILE
        return cls(**json.loads(file.read_text())) if file.exists() else None

    def why_unbounded(self) -> str:
        """Why phases on the host do not bound what knobs of single phases can give; empty: they do.

        They do where each works for itself alone.
        """
        if Taker.DDP in self.wrappers:
            return "DistributedDataParallel copies and sends gradients amid the backward pass"
        if WORKERS.of(self.values):
            return "processes of its DataLoader take processor time from every phase"
        return ""

    def changeable(self) -> dict[str, str]:
        """Knobs that can be changed in this script from outside, and through what."""
        made = {
            Taker.DDP: "DistributedDataParallel" if Taker.DDP in self.wrappers else "",
            Taker.FULLY_SHARD: "fully_shard" if Taker.FULLY_SHARD in self.wrappers else "",
            Taker.FSDP1: "FullyShardedDataParallel" if Taker.FSDP1 in self.wrappers else "",
            Taker.LOADER: "DataLoader" if self.loaders else "",
            Taker.MODULE: "torch.nn.Module" if self.modules else "",
            Taker.OPTIMIZER: " and ".join(sorted(set(self.optimizers))),
        }
        return {
            name: through
            for taker, through in made.items()
            if through
            for name in names_of_taker(taker)
        }
