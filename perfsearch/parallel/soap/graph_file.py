"""A graph as JSON, so that a captured model can be planned for without capturing it again."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

from perfsearch.parallel.soap import axes, graph
from perfsearch.parallel.soap.graph import Graph

SCHEMA = 1
_CLASSES = {
    c.__name__: c
    for c in (*axes.Axis.__args__, graph.Graph, graph.Operator, graph.Parameter, graph.Stage)
}


def dump(captured: Graph) -> str:
    """Everything that planning needs of a graph."""
    return json.dumps({"schema": SCHEMA, "graph": _plain(captured)})


def parse(text: str) -> Graph:
    """Read what ``dump`` wrote.

    Raises:
        ValueError: it is of another version, or damaged.

    """
    record = json.loads(text)
    if record.get("schema") != SCHEMA:
        raise ValueError(f"a graph of schema {record.get('schema')!r}; {SCHEMA} is needed")
    made = _made(record["graph"])
    if not isinstance(made, Graph):
        raise ValueError("not a graph")
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return {"enum": value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__name__ not in _CLASSES:
            return {"text": repr(value)}
        fields = dataclasses.fields(value)
        return {
            "class": type(value).__name__,
            **{f.name: _plain(getattr(value, f.name)) for f in fields},
        }
    if isinstance(value, tuple):
        return {"tuple": [_plain(part) for part in value]}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {"map": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"text": repr(value)}


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        fields = {k: _made(v) for k, v in value.items() if k != "class"}
        return _CLASSES[value["class"]](**fields)
    if "enum" in value:
        return graph.Role(value["enum"])
    if "tuple" in value:
        return tuple(_made(part) for part in value["tuple"])
    if "set" in value:
        return frozenset(value["set"])
    if "text" in value:
        return value["text"]
    return {_made(k): _made(v) for k, v in value["map"]}
