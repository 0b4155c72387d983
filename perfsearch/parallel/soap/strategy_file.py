"""A strategy as a readable YAML file: how each operator, by name, is split and placed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perfsearch.core.suggest import nearest
from perfsearch.parallel.soap.configuration import (
    OperatorConfiguration,
    Plan,
    PlanError,
    validate,
)
from perfsearch.parallel.soap.graph import Graph, Operator

SCHEMA = 1


def dump(graph: Graph, plan: Plan, device_count: int) -> str:
    """The plan as YAML, a line an operator in the order of the user's code."""
    names = {o.name: _written(o.name) for o in graph.planned}
    width = max(map(len, names.values()), default=0) + 1
    lines = [
        "# Of each operator's output: the number of parts along each dimension (shape beside it),",
        "# and the device of each part in row-major order.",
        f"schema: {SCHEMA}",
        f"devices: {device_count}",
        "operators:",
    ]
    for operator in graph.planned:
        chosen = plan[operator.name]
        lines.append(
            f"  {names[operator.name] + ':':<{width}} {{degrees: {list(chosen.degrees)}, "
            f"devices: {list(chosen.devices)}}}  # {operator.kind} {list(operator.shape)}"
        )
    return "\n".join(lines) + "\n"


def parse(text: str, graph: Graph, device_count: int | None = None) -> Plan:
    """Read what ``dump`` wrote, or the same as JSON, and check it against model and machine.

    Args:
        text: of the file.
        graph: the model's.
        device_count: devices that there are; ``None``: as many as the file says.

    Raises:
        PlanError: it is not such a file, or does not fit; the operator is named.

    """
    record = _load(text)
    if record.get("schema") != SCHEMA:
        raise PlanError(
            f"schema: {record.get('schema')!r}, and this perfsearch reads {SCHEMA}. "
            "Export the strategy again"
        )
    operators = record.get("operators")
    if not isinstance(operators, Mapping):
        raise PlanError("operators: a mapping of operator names is needed")
    known = {operator.name for operator in graph.planned}
    plan: Plan = {}
    for name, entry in operators.items():
        if name not in known:
            raise PlanError(
                f"operator {name}: the model has none of this name that is planned. "
                f"{nearest(name, known)}"
            )
        plan[name] = _entry(name, entry)
    count = record.get("devices") if device_count is None else device_count
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"devices: {count!r}, a number of devices is needed")
    validate(graph, plan, count)
    return plan


def table(graph: Graph, plan: Plan) -> list[str]:
    """A line an operator, as FlexFlow prints its result."""
    return [_table_line(o, plan[o.name]) for o in graph.planned]


def _table_line(operator: Operator, chosen: OperatorConfiguration) -> str:
    dims = ",".join(map(str, chosen.degrees))
    devices = ",".join(map(str, chosen.devices))
    return f"[{operator.name}] num_dims({len(chosen.degrees)}) dims[{dims}] device_ids[{devices}]"


def _written(name: str) -> str:
    """A name such that any reader of YAML takes it for text: not 0.10 for the number 0.1."""
    import yaml  # type: ignore[import-untyped]

    try:
        plain = yaml.safe_load(f"{name}: 0") == {name: 0}
    except yaml.YAMLError:
        plain = False
    return name if plain else json.dumps(name)


def _load(text: str) -> Mapping[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Takes keys as they are written, each once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise PlanError(f"not a strategy: a name is needed in line {_line(key)}")
                if key.value in found:
                    raise PlanError(f"operator {key.value}: line {_line(key)} has it a second time")
                found[key.value] = self.construct_object(value, deep=True)
            return found

    def _line(node: Any) -> int:
        return int(node.start_mark.line) + 1

    try:
        record = Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise PlanError(f"not a strategy: {' '.join(str(error).split())}") from error
    if not isinstance(record, Mapping):
        raise PlanError("not a strategy: schema, devices and operators are needed")
    return record


def _entry(name: str, entry: Any) -> OperatorConfiguration:
    values = {}
    for key in ("degrees", "devices"):
        value = entry.get(key) if isinstance(entry, Mapping) else None
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise PlanError(f"operator {name}: {key} {value!r}, a list of whole numbers is needed")
        values[key] = tuple(value)
    extra = sorted(set(map(str, entry)) - set(values))
    if extra:
        raise PlanError(f"operator {name}: {extra[0]} is unknown; allowed: degrees, devices")
    return OperatorConfiguration(**values)
