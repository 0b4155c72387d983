"""File formats of a plan: our YAML, FlexFlow's files, and Python for torch's DTensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import nearest
from perfsearch.soap.graph import Graph, Operator, Rectangle
from perfsearch.soap.parts import TABLES
from perfsearch.soap.plan import (
    OperatorConfiguration,
    Plan,
    PlanError,
    over_samples,
    part_rectangles,
    validate_plan,
)
from perfsearch.soap.rules.base import (
    input_rectangle,
    parameter_rectangles,
    sizes,
    stage_rectangles,
)

SCHEMA = 1

GRAPH, MACHINE, COSTS = "graph.json", "machine.json", "costs.json"
"""Files that rank 0 leaves in the directory, and that a search keeps as its input tables."""


def read_plan(path: Path, graph: Graph, devices: int) -> Plan:
    """Read a strategy, ours or FlexFlow's.

    Raises:
        PlanError: it is neither, or does not fit; the operator is named.

    """
    try:
        data = path.read_bytes()
        entries = protobuf_entries(data)
        if entries is not None:
            return plan_of_entries(entries, graph, devices)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot be read as text: {error}") from error
    if is_flexflow(text):
        return parse_flexflow(text, graph, devices)
    return parse_plan(text, graph, devices)


def dump_plan(graph: Graph, plan: Plan, device_count: int) -> str:
    """The plan as YAML, a line an operator in the order of the user's code."""
    names = {o.name: _written(o.name) for o in graph.planned}
    width = max(map(len, names.values()), default=0) + 1
    lines = [
        "# Of each operator's output: the number of parts along each dimension (shape beside it),",
        "# and the device of each part in row-major order; sums: so many parts share the sums that",
        "# their elements are.",
        f"schema: {SCHEMA}",
        f"devices: {device_count}",
        "operators:",
    ]
    for operator in graph.planned:
        chosen = plan[operator.name]
        sums = f", sums: {chosen.sums}" if chosen.sums > 1 else ""
        lines.append(
            f"  {names[operator.name] + ':':<{width}} {{degrees: {list(chosen.degrees)}, "
            f"devices: {list(chosen.devices)}{sums}}}  # {operator.kind} {list(operator.shape)}"
        )
    return "\n".join(lines) + "\n"


def parse_plan(text: str, graph: Graph, device_count: int | None = None) -> Plan:
    """Read what ``dump_plan`` wrote, or the same as JSON, and check it against model and machine.

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
    validate_plan(graph, plan, count)
    return plan


def plan_table(graph: Graph, plan: Plan) -> list[str]:
    """A line an operator, as FlexFlow prints its result."""
    return [_table_line(o, plan[o.name]) for o in graph.planned]


def _table_line(operator: Operator, chosen: OperatorConfiguration) -> str:
    dims = ",".join(map(str, chosen.degrees))
    devices = ",".join(map(str, chosen.devices))
    shared = f" sums({chosen.sums})" if chosen.sums > 1 else ""
    split = f"num_dims({len(chosen.degrees)}) dims[{dims}]{shared}"
    return f"[{operator.name}] {split} device_ids[{devices}]"


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
    sums = entry.get("sums", 1)
    if type(sums) is not int or sums < 1:
        raise PlanError(f"operator {name}: sums {sums!r}, a whole number from 1 on is needed")
    extra = sorted(set(map(str, entry)) - {*values, "sums"})
    if extra:
        raise PlanError(f"operator {name}: {extra[0]} is unknown; allowed: degrees, devices, sums")
    return OperatorConfiguration(**values, sums=sums)


# -----------------------------------------------------------------------------
# FlexFlow's strategy files: text in its releases up to 22.07, protobuf in the first ones.
#
# Text: the number of operators, then for each its name, type of device, number of dimensions,
# degrees, number of parts and their devices, apart by white space. Protobuf: a message for each,
# with the same (src/runtime/strategy.proto). Degrees lie innermost first, so in the reverse of
# ours; parts are counted with the innermost dimension running fastest, as ours are. A file may
# leave the devices out, as its loader allows: parts are then on the first ones in order.
_MOST_DIMENSIONS = 8
_MOST_PARTS = 1024


@dataclass(frozen=True)
class Entry:
    """One operator of a file, degrees in our order."""

    name: str
    degrees: tuple[int, ...]
    devices: tuple[int, ...]


def flexflow_entries(text: str) -> list[Entry]:
    """What a file says.

    Raises:
        PlanError: it is not such a file; the operator at which it ends being one is named.

    """
    words = iter(text.split())
    count = _number(words, "the number of operators", 0, 100_000)
    found = []
    for position in range(count):
        name = next(words, "")
        if not name:
            raise PlanError(f"FlexFlow strategy: {count} operators are announced, {position} there")
        where = f"operator {name}"
        _number(words, f"{where}: type of device", 0, 1)
        dims = _number(words, f"{where}: number of dimensions", 0, _MOST_DIMENSIONS)
        degrees = [_number(words, f"{where}: degree", 1, _MOST_PARTS) for _ in range(dims)]
        parts = _number(words, f"{where}: number of parts", 0, _MOST_PARTS)
        ids = [_number(words, f"{where}: device", 0, _MOST_PARTS) for _ in range(parts)]
        ids = ids or list(range(math.prod(degrees)))
        found.append(Entry(name, tuple(reversed(degrees)), tuple(ids)))
    if next(words, None) is not None:
        raise PlanError(f"FlexFlow strategy: there is more than its {count} operators")
    return found


_OPS = 1
_NAME, _DEVICE_TYPE, _DIMS, _DEVICE_IDS = 1, 2, 3, 4
"""Fields of FlexFlow's messages ``Strategy`` and ``Op``, by the numbers of its strategy.proto."""

_LONGEST_SHIFT = 63
"""Of the last byte of a number, which has ten at most."""


def protobuf_entries(data: bytes) -> list[Entry] | None:
    """What a protobuf file of FlexFlow's says; ``None``: it is no such file.

    Two kinds of fields are all that it has, which the package ``protobuf``, weighed, would read in
    no fewer lines, for a dependency and a generated module.
    """
    if not data.startswith(bytes([_OPS << 3 | 2])):
        return None
    try:
        return [
            _message(value)
            for number, value in _fields(data)
            if number == _OPS and isinstance(value, bytes)
        ]
    except (IndexError, ValueError):
        return None


def _message(data: bytes) -> Entry:
    """One operator; numbers of a field may lie apart, or packed into one."""
    name, found = "", {_DEVICE_TYPE: [0], _DIMS: [], _DEVICE_IDS: []}
    for number, value in _fields(data):
        if number == _NAME and isinstance(value, bytes):
            name = value.decode("utf-8")
        elif number in found:
            found[number] += [value] if isinstance(value, int) else _varints(value)
    dims, ids = found[_DIMS], found[_DEVICE_IDS]
    if not name or not 1 <= len(dims) <= _MOST_DIMENSIONS or min(dims) < 1:
        raise ValueError("an operator has a name and degrees")
    if math.prod(dims) > _MOST_PARTS:
        raise ValueError("an operator has no more parts than that")
    return Entry(name, tuple(reversed(dims)), tuple(ids or range(math.prod(dims))))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message: their numbers, and an integer or bytes each."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        value, place = _varint(data, place)
        if tag & 7 == 0:
            yield tag >> 3, value
        elif tag & 7 == 2 and place + value <= len(data):
            yield tag >> 3, data[place : place + value]
            place += value
        else:
            raise ValueError("neither a whole number nor bytes")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while data[place] & 0x80:
        if shift == _LONGEST_SHIFT:
            raise ValueError("longer than a number of 64 bits")
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


def _varints(data: bytes) -> list[int]:
    found, place = [], 0
    while place < len(data):
        value, place = _varint(data, place)
        found.append(value)
    return found


def dump_flexflow(graph: Graph, plan: Plan) -> str:
    """The plan as such a file.

    Raises:
        PlanError: parts share sums, which the form cannot say; the operator is named.

    """
    shared = next((name for name, chosen in plan.items() if chosen.sums > 1), None)
    if shared is not None:
        raise PlanError(f"operator {shared}: parts share sums, which FlexFlow's text cannot say")
    lines = [str(len(graph.planned))]
    for operator in graph.planned:
        chosen = plan[operator.name]
        numbers = [0, len(chosen.degrees), *reversed(chosen.degrees)]
        numbers += [len(chosen.devices), *chosen.devices]
        lines.append(" ".join([operator.name, *map(str, numbers)]))
    return "\n".join(lines) + "\n"


def is_flexflow(text: str) -> bool:
    """Whether a file begins as one of FlexFlow's does: with a number by itself."""
    first = text.split(maxsplit=1)[:1]
    return bool(first) and first[0].isdecimal()


def parse_flexflow(text: str, graph: Graph, device_count: int) -> Plan:
    """The plan of a text file for a model.

    Raises:
        PlanError: it does not fit; the operator is named.

    """
    return plan_of_entries(flexflow_entries(text), graph, device_count)


def plan_of_entries(read: Sequence[Entry], graph: Graph, device_count: int) -> Plan:
    """The plan of a file for a model: by name, by place or by kind where no name is known.

    A loss that the file lacks is split over samples like what it reads.

    Raises:
        PlanError: it does not fit; the operator is named.

    """
    planned = [o.name for o in graph.planned]
    known = set(planned)
    named = {entry.name: entry for entry in read}
    if len(named) < len(read):
        twice = next(e.name for i, e in enumerate(read) if e.name in {f.name for f in read[:i]})
        raise PlanError(f"operator {twice}: the file has it twice")
    if not any(name in known for name in named):
        by_kind = _by_kind(named, graph, device_count)
        if not by_kind and len(read) not in (len(planned), len(planned) - 1):
            raise PlanError(
                f"operator {read[0].name if read else ''}: the model has none of this name, and "
                f"{len(read)} operators cannot be told by their order from {len(planned)}"
            )
        named = by_kind or dict(zip(planned, read, strict=False))
    unknown = [name for name in named if name not in known]
    if unknown:
        raise PlanError(f"operator {unknown[0]}: the model has none of this name")
    plan: Plan = {}
    for operator in graph.planned:
        entry = named.get(operator.name)
        if entry is None:
            if operator.name != graph.output or operator.inputs[0] not in plan:
                raise PlanError(f"operator {operator.name}: the file has no entry of it")
            before = plan[operator.inputs[0]]
            degrees = [1] * len(operator.shape)
            if operator.shape and all(d == 1 for d in before.degrees[1:]):
                degrees[0] = before.degrees[0]
            count = degrees[0] if degrees else 1
            plan[operator.name] = OperatorConfiguration(tuple(degrees), before.devices[:count])
        else:
            plan[operator.name] = OperatorConfiguration(entry.degrees, entry.devices)
    validate_plan(graph, plan, device_count)
    return plan


_KINDS = {"linear": "linear", "concat": "concatenate", "mse_loss": "elementwise_loss"}


def _by_kind(named: Mapping[str, Entry], graph: Graph, device_count: int) -> dict[str, Entry]:
    """Of a file as FlexFlow ships them for DLRM: tables by number, one entry for all of a kind.

    What has none is data parallel, as in FlexFlow; nothing where an entry is of no such kind.
    """
    tables = [o.name for o in graph.planned if o.kind in TABLES]
    entries = {ours: named[theirs] for theirs, ours in _KINDS.items() if theirs in named}
    found: dict[str, Entry] = {}
    used: set[str] = set()
    for operator in graph.planned:
        entry = entries.get(operator.kind)
        if operator.kind in TABLES:
            entry = named.get(f"embedding{tables.index(operator.name)}")
        if entry is None:
            chosen = over_samples(operator, range(device_count))
            found[operator.name] = Entry(operator.name, chosen.degrees, chosen.devices)
            continue
        # ours may have a last dimension less, or more
        count = len(operator.shape)
        degrees = (*entry.degrees, *(1,) * count)
        if any(degree > 1 for degree in degrees[count:]):
            raise PlanError(
                f"operator {operator.name}: degrees {list(entry.degrees)} of {entry.name}, and it "
                f"has {count} dimensions"
            )
        found[operator.name] = replace(entry, degrees=degrees[:count])
        used.add(entry.name)
    return found if used == set(named) else {}


def _number(words: Iterator[str], what: str, low: int, high: int) -> int:
    word = next(words, None)
    if word is None or not word.isdecimal() or not low <= int(word) <= high:
        raise PlanError(f"FlexFlow strategy: {what}: {word!r}, a number from {low} to {high}")
    return int(word)


# -----------------------------------------------------------------------------
# One mesh with regular shards, as Python for torch's DTensor.
#
# DTensor moves nothing, and says nothing, between different meshes, so that only plans whose every
# operator is split in as many equal parts as there are devices, in their order, are written.


class NotRegular(ValueError):
    """The plan cannot be written for DTensor; the message names the operator."""


@dataclass(frozen=True)
class Sharding:
    """Where a module's tensors are split: a dimension, or ``None`` for a copy on each device."""

    input: int | None
    output: int | None
    parameters: tuple[tuple[str, int | None], ...]


def module_shardings(graph: Graph, plan: Plan, device_count: int) -> dict[str, Sharding]:
    """Sharding of each module that has parameters, by its name in the model.

    Raises:
        NotRegular: an operator is not split over all devices in equal parts.

    """
    found: dict[str, Sharding] = {}
    placed: dict[str, tuple[str, int | None]] = {}
    for operator in graph.planned:
        part = _first_part(operator, plan[operator.name], device_count)
        if not operator.parameters:
            continue
        sharding = _sharding(operator, part, device_count)
        for parameter, (name, dim) in zip(operator.parameters, sharding.parameters, strict=True):
            module, _, attribute = parameter.key.rpartition(".")
            before = placed.setdefault(parameter.key, (operator.name, dim))
            if before[1] != dim:
                raise NotRegular(
                    f"operator {operator.name}: splits {parameter.key} otherwise than "
                    f"{before[0]}, which has the same"
                )
            if attribute != name or found.get(module, sharding) != sharding:
                raise NotRegular(
                    f"operator {operator.name}: {parameter.key} is used apart from a module's "
                    "own forward pass"
                )
            found[module] = sharding
    return found


def _first_part(
    operator: Operator, configuration: OperatorConfiguration, device_count: int
) -> Rectangle:
    divided = [d for d, degree in enumerate(configuration.degrees) if degree > 1]
    regular = (
        configuration.devices == tuple(range(device_count))
        and len(divided) == 1
        and operator.shape[divided[0]] % device_count == 0
    )
    if device_count > 1 and not regular:
        raise NotRegular(
            f"operator {operator.name}: degrees {list(configuration.degrees)} on devices "
            f"{list(configuration.devices)}; DTensor has one mesh, so one dimension in "
            f"{device_count} equal parts on devices 0 to {device_count - 1} is needed"
        )
    return part_rectangles(operator, configuration)[0]


def _sharding(operator: Operator, part: Rectangle, device_count: int) -> Sharding:
    head = stage_rectangles(operator, part)[0]
    reads = parameter_rectangles(operator, part)
    need = input_rectangle(operator, 0, part)
    if operator.attributes.get("merged_rows"):
        raise NotRegular(f"operator {operator.name}: its module has its rows in one dimension")
    if need is None or len(operator.inputs) != 1:
        raise NotRegular(f"operator {operator.name}: it does not have one input")

    def divided(rectangle: Rectangle, whole: Rectangle) -> int | None:
        dims = [d for d, span in enumerate(rectangle) if span != whole[d]]
        full, own = sizes(whole), sizes(rectangle)
        if any(full[d] != device_count * own[d] for d in dims):
            raise NotRegular(f"operator {operator.name}: parts overlap, as those of windows do")
        if len(dims) > 1:
            raise NotRegular(f"operator {operator.name}: more than one dimension is split")
        return dims[0] if dims else None

    # what all of it reads need not be all that there is, as where a window steps over the last rows
    every = input_rectangle(operator, 0, operator.whole)
    assert every is not None
    output = divided(head, tuple((0, size) for size in operator.stages[0].shape))
    blocks = operator.attributes.get("blocks", 0)
    if blocks and output is not None and output > len(head) - blocks:
        raise NotRegular(f"operator {operator.name}: rows of its weight are split in blocks")
    return Sharding(
        input=divided(need, every),
        output=output,
        parameters=tuple(
            (
                parameter.name,
                divided(reads[parameter.name], tuple((0, size) for size in parameter.shape)),
            )
            for parameter in operator.parameters
        ),
    )


def dump_dtensor(graph: Graph, plan: Plan, device_count: int) -> str:
    """A Python module that splits the model as the plan has it.

    Raises:
        NotRegular: the plan cannot be written for DTensor.

    """
    lines = [
        f"    {name!r}: ({_placement(sharding.input)}, {_placement(sharding.output)}, "
        f"{{{', '.join(f'{n!r}: {_placement(d)}' for n, d in sharding.parameters)}}}),"
        for name, sharding in module_shardings(graph, plan, device_count).items()
    ]
    return _TEMPLATE.replace("@PLAN@", "\n".join(lines)).replace("@DEVICES@", str(device_count))


def _placement(dim: int | None) -> str:
    return "Replicate()" if dim is None else f"Shard({dim})"


_TEMPLATE = '''"""The strategy for torch's DTensor: parallelize(model), then give it DTensors.

    mesh = parallelize(model, "cuda")
    inputs = DTensor.from_local(share_of_this_rank, mesh, [Shard(0)])
    loss = loss_function(model(inputs), targets_of_the_whole_batch)

Modules without an entry follow their inputs. The model's outputs are gathered and plain tensors:
DTensor's gradient of a mean over shards is too large by the number of devices (torch 2.13).
Dropout draws other masks than one device would.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

DEVICES = @DEVICES@

# by module: of its input, of its output, of its parameters
PLAN = {
@PLAN@
}


def parallelize(model, device_type):
    """Split the model's parameters; return the mesh."""
    mesh = init_device_mesh(device_type, (DEVICES,))
    made = {}  # tied parameters stay tied

    def split(parameter, placement):
        if id(parameter) not in made:
            shard = distribute_tensor(parameter.data, mesh, [placement])
            made[id(parameter)] = torch.nn.Parameter(shard, parameter.requires_grad)
        return made[id(parameter)]

    def move(value, placement):
        if not isinstance(value, DTensor):
            return value
        if value.device_mesh != mesh:
            raise ValueError("a tensor of another mesh: DTensor would not move it")
        return value.redistribute(mesh, [placement])

    def gather(value):
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(
                "the model reduces over shards, as to a loss, and the gradient of that would be "
                "too large; let it return what the loss is computed from"
            )
        return value.full_tensor()

    for name, (before, after, parameters) in PLAN.items():
        module = model.get_submodule(name)
        for key, placement in parameters.items():
            setattr(module, key, split(getattr(module, key), placement))
        module.register_forward_pre_hook(
            lambda module, inputs, before=before: (move(inputs[0], before), *inputs[1:])
        )
        module.register_forward_hook(
            lambda module, inputs, output, after=after: move(output, after)
        )
    model.register_forward_hook(
        lambda module, inputs, output: tree_map_only(DTensor, gather, output)
    )
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                setattr(module, key, split(parameter, Replicate()))
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, distribute_tensor(buffer, mesh, [Replicate()]))
    return mesh
'''
