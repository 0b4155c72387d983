"""Functions of a traced program that write into their operand."""

from __future__ import annotations

import operator as operators
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from perfsearch.parallel.soap.traced import place_of
from perfsearch.parallel.soap.tracing import CaptureError


class Writes:
    """Which calls write in place, and that nobody sees the difference.

    Args:
        nodes: of the program, in order.
        buffers: placeholders of the model's buffers.

    Attributes:
        in_place: calls that may be replaced by what they are without writing.
        skipped: calls that count steps in a buffer; ``counters`` has them.
        counters: buffers and what a step adds.

    Raises:
        CaptureError: a written tensor, or a view of it, is used afterwards by its old name.

    """

    def __init__(self, nodes: Sequence[fx.Node], buffers: Mapping[str, str]) -> None:
        self.in_place: set[fx.Node] = set()
        self.skipped: set[fx.Node] = set()
        counters: list[tuple[str, int]] = []
        order = {node: i for i, node in enumerate(nodes)}
        base: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if node.op != "call_function":
                continue
            written = _written(node)
            _require_no_output(node)
            if written is None:
                viewed = _viewed(node)
                if viewed is not None:
                    base[node] = base.get(viewed, viewed)
                continue
            step = node.args[1] if len(node.args) > 1 else None
            if written.name in buffers and _adds(node) and isinstance(step, int):
                counters.append((buffers[written.name], step))
                self.skipped.add(node)
                continue
            root = base.get(written, written)
            aliases = [root, *(alias for alias, source in base.items() if source is root)]
            late = [u for a in aliases for u in a.users if order[u] > order[node]]
            if root.op == "placeholder" or root.op == "get_attr" or late:
                raise CaptureError(
                    f"{node.target} writes into a tensor that is "
                    + ("kept" if not late else f"used again by {late[0].name}")
                    + f"; write its result to a new tensor instead; {place_of(node)}"
                )
            self.in_place.add(node)
        self.counters = tuple(counters)


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _written(node: fx.Node) -> fx.Node | None:
    schema = _schema(node)
    if schema is None or not schema.arguments or schema.name.split("::")[1] == "batch_norm":
        return None
    info = schema.arguments[0].alias_info
    if info is None or not info.is_write:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def _require_no_output(node: fx.Node) -> None:
    """Refuse what writes into any other than its first operand, such as ``out=``."""
    schema = _schema(node)
    if schema is None or schema.name.split("::")[1] == "batch_norm":
        return
    for place, argument in list(enumerate(schema.arguments))[1:]:
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if given is not None and argument.alias_info is not None and argument.alias_info.is_write:
            raise CaptureError(
                f"{node.target} writes into its {argument.name}; write its result to a new tensor "
                f"instead; {place_of(node)}"
            )


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory the result may share."""
    if node.target is operators.getitem:
        first = node.args[0]
        return first if isinstance(first, fx.Node) else None
    schema = _schema(node)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    views = any(r.alias_info is not None for r in schema.returns)
    may_share = schema.name.split("::")[1] in ("reshape", "flatten", "contiguous", "to", "dropout")
    return node.args[0] if views or may_share else None


def _adds(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.add_")
