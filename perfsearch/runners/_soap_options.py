"""The ``runner.*`` keys of ``runner=soap``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.config_options import option
from perfsearch.runners._soap_tables import roles_of


@dataclass(frozen=True)
class SoapOptions:
    """The ``runner.*`` keys of this runner.

    Attributes:
        device: ``auto`` (every visible GPU, else the CPU), ``cpu`` or ``cuda``.
        split: kinds of dimensions that may be split: ``sample``, ``attribute``, ``parameter``.
        import_from: strategy to start from, ours or FlexFlow's; with ``strategy.proposals=0`` it
            is measured as it is.
        export_to: where the strategy that is handed over is written, beside the run directory.
        tables: directory with ``graph.json``, ``machine.json`` and ``costs.json`` of an earlier
            search, or edited copies, to plan with instead of measuring.
        cache: directory of measured costs and machines that searches share; ``null``:
            ``~/.cache/perfsearch/soap``.
        device_memory_gib: memory to plan for; ``null``: the devices' own.
        min_coverage: smallest share of operators, and of FLOPs, that must have rules for splitting.
        cuda_graph: replay the step as a CUDA graph where it allows that.
        knobs: by operator: a value such as ``4x1@0,1,2,3`` pins it, a list of them gives its
            choices; others are searched.

    """

    device: str = "auto"
    split: tuple[str, ...] = ("sample", "attribute", "parameter")
    import_from: str | None = None
    export_to: str | None = None
    tables: str | None = None
    cache: str | None = None
    device_memory_gib: float | None = option(None, above=0)
    min_coverage: float = option(0.5, low=0, high=1)
    cuda_graph: bool = True
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles_of(self.split)
        if self.import_from is not None and not Path(self.import_from).is_file():
            raise ValueError(f"runner.import_from={self.import_from}: there is no such file")
        if self.export_to is not None:
            path = Path(self.export_to)
            if path.is_dir():
                raise ValueError(f"runner.export_to={path}: a directory; a file is needed")
            if not path.parent.is_dir():
                raise ValueError(
                    f"runner.export_to={path}: there is no directory {path.parent}; make it first"
                )
