"""What a model was captured as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from perfsearch.parallel.soap.graph import Graph


@dataclass(frozen=True)
class Captured:
    """A model as operators, and what the graph alone does not hold.

    Attributes:
        graph: of operators.
        leaves: names of the inputs that are the batch's tensors, in ``tree_flatten`` order.
        buffers: name of an input to the qualified name of the model's buffer.
        constants: tensors by name of the input.
        counters: buffers that a step adds a number to, such as batch norm's.
        tracer: ``export`` or ``fx``.

    """

    graph: Graph
    leaves: tuple[str, ...]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    counters: tuple[tuple[str, int], ...]
    tracer: str
