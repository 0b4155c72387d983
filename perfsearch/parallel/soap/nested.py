"""Parts of a traced program that lie in a function of their own: what runs under ``no_grad``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def inline_without_gradients(graph: fx.Graph) -> None:
    """Put what is computed under ``no_grad`` into the graph itself, its results detached.

    Other nested functions stay, and so do those within these.
    """
    for node in list(graph.nodes):
        if _name(node) != "wrap_with_set_grad_enabled":
            continue
        enabled, inner, *operands = node.args
        body = getattr(graph.owning_module, inner.target).graph
        if enabled or any(n.op in ("get_attr", "call_module") for n in body.nodes):
            continue
        results = _copied(graph, body, operands, node)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)


def _copied(graph: fx.Graph, body: fx.Graph, operands: list[Any], before: fx.Node) -> list[Any]:
    places = [n for n in body.nodes if n.op == "placeholder"]
    known = dict(zip(places, operands, strict=True))
    results: list[Any] = []
    with graph.inserting_before(before):
        for node in body.nodes:
            if node.op == "output":
                results = [_detached(graph, known[n]) for n in node.args[0]]
            elif node.op != "placeholder":
                known[node] = graph.node_copy(node, known.__getitem__)
    return results


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
