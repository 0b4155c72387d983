"""A plan that is one mesh with regular shards, as Python for torch's DTensor.

DTensor moves nothing, and says nothing, between different meshes, so that only plans whose every
operator is split in as many equal parts as there are devices, in their order, are written.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfsearch.parallel.soap.axes import Rectangle, Shape
from perfsearch.parallel.soap.configuration import OperatorConfiguration, Plan, part_rectangles
from perfsearch.parallel.soap.graph import Graph, Operator
from perfsearch.parallel.soap.rules import input_rectangle, parameter_rectangles, stage_rectangles


class NotRegular(ValueError):
    """The plan cannot be written for DTensor; the message names the operator."""


@dataclass(frozen=True)
class Layout:
    """Where a module's tensors are split: a dimension, or ``None`` for a copy on each device."""

    input: int | None
    output: int | None
    parameters: tuple[tuple[str, int | None], ...]


def layouts(graph: Graph, plan: Plan, device_count: int) -> dict[str, Layout]:
    """Layout of each module that has parameters, by its name in the model.

    Raises:
        NotRegular: an operator is not split over all devices in equal parts.

    """
    found: dict[str, Layout] = {}
    placed: dict[str, tuple[str, int | None]] = {}
    for operator in graph.planned:
        part = _first_part(operator, plan[operator.name], device_count)
        if not operator.parameters:
            continue
        layout = _layout(operator, part, device_count)
        for parameter, (name, dim) in zip(operator.parameters, layout.parameters, strict=True):
            module, _, attribute = parameter.key.rpartition(".")
            before = placed.setdefault(parameter.key, (operator.name, dim))
            if before[1] != dim:
                raise NotRegular(
                    f"operator {operator.name}: splits {parameter.key} otherwise than "
                    f"{before[0]}, which has the same"
                )
            if attribute != name or found.get(module, layout) != layout:
                raise NotRegular(
                    f"operator {operator.name}: {parameter.key} is used apart from a module's "
                    "own forward pass"
                )
            found[module] = layout
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


def _layout(operator: Operator, part: Rectangle, device_count: int) -> Layout:
    head = stage_rectangles(operator, part)[0]
    reads = parameter_rectangles(operator, part)
    need = input_rectangle(operator, 0, part)
    if need is None or len(operator.inputs) != 1:
        raise NotRegular(f"operator {operator.name}: it does not have one input")

    def divided(rectangle: Rectangle, shape: Shape) -> int | None:
        dims = [d for d, span in enumerate(rectangle) if span != (0, shape[d])]
        if any(shape[d] != device_count * (rectangle[d][1] - rectangle[d][0]) for d in dims):
            raise NotRegular(f"operator {operator.name}: parts overlap, as those of windows do")
        if len(dims) > 1:
            raise NotRegular(f"operator {operator.name}: more than one dimension is split")
        return dims[0] if dims else None

    output = divided(head, operator.stages[0].shape)
    blocks = operator.attributes.get("blocks", 0)
    if blocks and output is not None and output > len(head) - blocks:
        raise NotRegular(f"operator {operator.name}: rows of its weight are split in blocks")
    return Layout(
        input=divided(need, operator.input_shapes[0]),
        output=output,
        parameters=tuple(
            (parameter.name, divided(reads[parameter.name], parameter.shape))
            for parameter in operator.parameters
        ),
    )


def render(graph: Graph, plan: Plan, device_count: int) -> str:
    """A Python module that splits the model as the plan has it.

    Raises:
        NotRegular: the plan cannot be written for DTensor.

    """
    lines = [
        f"    {name!r}: ({_placement(layout.input)}, {_placement(layout.output)}, "
        f"{{{', '.join(f'{n!r}: {_placement(d)}' for n, d in layout.parameters)}}}),"
        for name, layout in layouts(graph, plan, device_count).items()
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
