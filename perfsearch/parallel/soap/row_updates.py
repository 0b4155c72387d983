"""Tables of one device under plain gradient descent: only the rows that were read change.

A dense gradient of a table is zeros but for the rows of the batch, and ``weight -= lr * gradient``
leaves the others as they are. Writing, reading and adding all of it is what a step with large
tables spends its time on; the rows alone give the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from perfsearch.parallel.soap.node import Node

_TABLES = ("embedding", "embedding_bag")


class RowUpdates:
    """Tables that are updated by rows.

    Args:
        tables: node of each table, by key of the parameter.
        optimizer: plain SGD.

    """

    def __init__(self, tables: Mapping[str, Node], optimizer: torch.optim.Optimizer) -> None:
        self._places = {node.place: key for key, node in tables.items()}
        self._nodes = dict(tables)
        self._groups = {
            id(parameter): group
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __contains__(self, node: Node) -> bool:
        return node.place in self._places

    def note(self, node: Node, indices: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the gradient of a node's output until the optimizer steps."""
        attributes = node.operator.attributes
        size = attributes.get("bag_size", 1)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if size > 1:
            rows = rows.repeat_interleave(size, 0)
            if attributes["mode"] == "mean":
                rows = rows / size
        self._rows[self._places[node.place]] = (indices.reshape(-1), rows)

    def apply(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Update the tables with the present learning rates."""
        for key, (indices, rows) in self._rows.items():
            group = self._groups[id(parameters[key])]
            rate = float(group["lr"]) * (-1.0 if group["maximize"] else 1.0)
            table = parameters[key].detach()
            table.index_add_(0, indices, rows.to(table.dtype), alpha=-rate)
        self._rows.clear()


def tables_of(nodes: list[Node], shared: set[str]) -> dict[str, Node]:
    """Tables that one operator of this rank reads, alone and as it stands.

    Args:
        nodes: of this rank.
        shared: keys of parameters whose gradients are summed with other ranks.

    """
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for use in node.uses:
            readers.setdefault(use.key, []).append(node)
    return {
        key: found[0]
        for key, found in readers.items()
        if key not in shared and len(found) == 1 and _only_reads(found[0])
    }


def _only_reads(node: Node) -> bool:
    """Whether the operator is the table alone, so that its gradient is that of the rows."""
    stages, attributes = node.operator.stages, node.operator.attributes
    padding = attributes.get("padding_idx")
    alone = len(stages) == 1 or all(
        s.kind == "cast" and s.dtype == stages[0].dtype and "detach" not in s.attributes
        for s in stages[1:]
    )
    return (
        node.operator.kind in _TABLES
        and alone
        and node.differentiable
        and all(use.trained and use.cut is None for use in node.uses)
        and attributes.get("bag_size", 1) is not None
        and (padding is None or padding < 0)
    )


def is_plain_descent(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is ``weight -= lr * gradient`` and nothing else."""
    return type(optimizer) is torch.optim.SGD and all(
        group["momentum"] == 0
        and group["weight_decay"] == 0
        and not isinstance(group["lr"], torch.Tensor)
        for group in optimizer.param_groups
    )
