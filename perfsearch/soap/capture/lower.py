"""From a call in a traced program to a stage: what a rule takes, and what it returns."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from perfsearch.soap.capture.trace import CaptureError
from perfsearch.soap.graph import WHOLE, Axis, Role, Same, Shape, Whole


@dataclass(frozen=True)
class Value:
    """A tensor of the traced program.

    Attributes:
        name: of the operator that computes it; of a parameter, its qualified name in the model.
        shape: whole.
        dtype: torch's name of it.
        labels: what each dimension is.
        parameter: whether it is a parameter of the model.
        trained: whether it has a gradient, where it is a parameter.
        local: whether every device can have it without a transfer.
        strides: of the whole tensor, where they are known.
        sampled: whether it depends on the batch.
        weighted: whether it depends on parameters.

    """

    name: str
    shape: Shape
    dtype: str
    labels: tuple[Role, ...]
    parameter: bool = False
    trained: bool = False
    local: bool = False
    strides: tuple[int, ...] = ()
    sampled: bool = False
    weighted: bool = False

    @property
    def memory_order(self) -> tuple[int, ...]:
        """Dimensions from the outermost in memory to the innermost."""
        if not self.strides:
            return tuple(range(len(self.shape)))
        return tuple(sorted(range(len(self.shape)), key=lambda d: -self.strides[d]))


@dataclass(frozen=True)
class Slot:
    """Stands for an operand among a call's plain arguments.

    Attributes:
        name: of a parameter of the operator; empty for an input.
        index: of the input.

    """

    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Call:
    """One call of the traced program.

    Attributes:
        name: of the function, such as ``layer_norm``.
        target: the function.
        arguments: by the names of the function's schema, defaults filled in; tensors are
            ``Value``.
        shape: of the result.
        dtype: of the result.
        is_output: whether the result is the loss.
        sources: by name of a value, the call that made it.
        output: of a function that gives several tensors, which one is meant.

    """

    name: str
    target: Any
    arguments: Mapping[str, Any]
    shape: Shape
    dtype: str
    is_output: bool
    sources: Mapping[str, Call]
    output: int | None = None

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument that the function may not have."""
        return self.arguments.get(argument, default)


@dataclass
class Lowered:
    """A stage in the making.

    Attributes:
        kind: of the stage.
        labels: what each dimension of the output is.
        splittable: dimensions of the output that may be divided.
        operands: inputs with what is read of each.
        parameters: by name in the operator, with what is read of each.
        attributes: plain values for the kernel.
        shape: where it differs from that of the call's result.
        flops: of the forward pass.
        precision: what autocast does: ``lower``, ``full`` or ``keep``.

    """

    kind: str
    labels: tuple[Role, ...]
    splittable: tuple[bool, ...]
    operands: list[tuple[Value, tuple[Axis, ...]]] = field(default_factory=list)
    parameters: dict[str, tuple[Value, tuple[Axis, ...]]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    shape: Shape | None = None
    flops: float = 0.0
    precision: str = "keep"

    def operand(self, value: Value | None, axes: Sequence[Axis], name: str = "") -> Slot | None:
        """Take in a tensor; a parameter under ``name``."""
        if value is None:
            return None
        if value.parameter:
            name = name or f"operand_{len(self.parameters)}"
            self.parameters[name] = (value, tuple(axes))
            return Slot(name=name)
        self.operands.append((value, tuple(axes)))
        return Slot(index=len(self.operands) - 1)


Rule = Callable[[Call], Lowered | None]
"""Gives the stage; ``None`` where this form of the function is not covered."""

RULES: dict[str, Rule] = {}

TAKE_PARAMETERS = frozenset(
    {
        "linear",
        "addmm",
        "baddbmm",
        "einsum",
        "matmul",
        "embedding",
        "embedding_bag",
        "conv1d",
        "conv2d",
        "conv3d",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "group_norm",
        "instance_norm",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    }
)
"""Functions whose rules take parameters as they are; others take them as tensors."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = function
        return function

    return register


def called(lowered: Lowered, call: Call, axes: Mapping[str, Any]) -> Lowered:
    """Complete a stage that is the function itself on the part.

    Args:
        lowered: without operands.
        call: of the function, whose other arguments stay as they are.
        axes: by argument what is read of the tensor, or of each of a list of them.

    """

    def slots(argument: Any, read: Any, name: str) -> Any:
        if isinstance(argument, list | tuple):
            return [slots(a, r, "") for a, r in zip(argument, read, strict=True)]
        return lowered.operand(argument, read, name)

    lowered.attributes = {
        "target": str(call.target),
        "arguments": {
            name: slots(argument, axes[name], name) if name in axes else argument
            for name, argument in call.arguments.items()
        },
    }
    return lowered


def same(count: int) -> tuple[Axis, ...]:
    """Index for index in every dimension."""
    return tuple(Same(dim) for dim in range(count))


def whole(shape: Shape) -> tuple[Axis, ...]:
    """All of it."""
    return tuple(Whole(size) for size in shape)


def broadcast(shape: Shape, output: Shape) -> tuple[Axis, ...]:
    """As an operand of an elementwise function whose result is ``output``."""
    first = len(output) - len(shape)
    return tuple(
        Same(first + dim) if size == output[first + dim] else Whole(size)
        for dim, size in enumerate(shape)
    )


def broadcast_labels(values: Sequence[Value], output: Shape) -> tuple[Role, ...]:
    """What the result's dimensions are: samples where an operand says so, else by the first."""
    labels: list[Role | None] = [None] * len(output)
    for value in values:
        first = len(output) - len(value.shape)
        for dim, (size, label) in enumerate(zip(value.shape, value.labels, strict=True)):
            fits = size == output[first + dim]
            if fits and (labels[first + dim] is None or label is Role.SAMPLE):
                labels[first + dim] = label
    return tuple(label or Role.ATTRIBUTE for label in labels)


def plain(value: Any) -> bool:
    """Whether a value holds no tensor."""
    if isinstance(value, list | tuple):
        return all(plain(part) for part in value)
    return not isinstance(value, Value)


def positive(dim: int, count: int) -> int:
    """A dimension counted from the front."""
    return dim + count if dim < 0 else dim


# -----------------------------------------------------------------------------
# Facts of single calls of a traced program.

_TRACER = str(Path(__file__).with_name("trace.py"))
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def counted_flops(call: Call, lowered: Lowered) -> float:
    """Those of the products and convolutions that it does; an operation an element if none."""
    from torch.utils.flop_counter import FlopCounterMode

    def meta(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [meta(part) for part in argument]
        if not isinstance(argument, Value):
            return argument
        return torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device="meta")

    tensors = [value for value, _ in lowered.operands]
    elements = float(sum(math.prod(value.shape) for value in tensors))
    by_name = {a.name for a in call.target._schema.arguments if a.kwarg_only}
    made = {name: meta(value) for name, value in call.arguments.items() if name != "device"}
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call.target(
                *[value for name, value in made.items() if name not in by_name],
                **{name: value for name, value in made.items() if name in by_name},
            )
    except Exception:  # no shape without values: nothing that counts products
        return elements
    return float(counter.get_total_flops()) or elements


def gives_many(node: fx.Node) -> bool:
    """Whether a call gives several tensors, or none."""
    return not isinstance(node.meta.get("val"), torch.Tensor)


def draws_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def out_of_place(target: Any) -> Any:
    """The function that gives what another one writes."""
    name = target._schema.name.split("::")[1].removesuffix("_")
    packet = getattr(torch.ops.aten, name)
    return getattr(packet, target._overloadname)


def dtype_out_of_place(node: fx.Node) -> torch.dtype:
    """What a call that writes would give if it made a new tensor."""

    def seen(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta.get("val")
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    arguments = fx.node.map_aggregate(node.args, seen)
    keywords = fx.node.map_aggregate(node.kwargs, seen)
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        made = out_of_place(node.target)(*arguments, **keywords)
    dtype: torch.dtype = made.dtype
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    """As torch names it, without ``torch``."""
    return str(tensor.dtype).removeprefix("torch.")


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that calls it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]).removeprefix("model").removeprefix(".") if paths else ""


def place_of(node: fx.Node) -> str:
    """The line of the user's code: the innermost one that is not torch's."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    own = [ln for ln in lines if not ln.startswith((f'File "{_TORCH}', f'File "{_TRACER}"'))]
    if not own:
        inside = _first_inside(node)
        return "the loss function" if inside is None else place_of(inside)
    parts = own[-1].split(",")
    path = parts[0].removeprefix("File ").strip('"')
    return f"{path}:{parts[1].strip().removeprefix('line ')}"


def _first_inside(node: fx.Node) -> fx.Node | None:
    """The first call that a higher-order operator, such as that of ``autocast``, runs."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = getattr(node.graph.owning_module, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                return next((n for n in body.graph.nodes if n.op == "call_function"), None)
    return None


_LINEAR = frozenset({"mul", "div", "neg", "to", "_to_copy", "clone"})


def loss_and_scale(output: fx.Node, losses: Collection[str]) -> tuple[fx.Node, float]:
    """The loss that the output is a multiple of, and the factor; the output itself if none.

    Args:
        output: of the program.
        losses: names of functions that can be split over their terms.

    """
    node, scale = output, 1.0
    while node.op == "call_function" and _name(node) in _LINEAR:
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        rest = [a for a in node.args[1:] if _name(node) in ("mul", "div")]
        numbers = [a for a in rest if isinstance(a, int | float)]
        if tensors != [node.args[0]] or len(numbers) != len(rest) or node.kwargs:
            return output, 1.0
        for number in numbers:
            scale = scale * number if _name(node) == "mul" else scale / number
        scale = -scale if _name(node) == "neg" else scale
        node = tensors[0]
    return (node, scale) if _name(node) in losses else (output, 1.0)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.split("::")[1])


def batch_size(nodes: Sequence[fx.Node], leaves: Collection[str]) -> int:
    """Samples, which the first dimension of each tensor of the batch counts.

    Raises:
        CaptureError: they have no common first dimension.

    """
    tensors = [node.meta["val"] for node in nodes if node.name in leaves]
    sizes = {int(tensor.shape[0]) if tensor.dim() else -1 for tensor in tensors}
    if len(sizes) != 1 or -1 in sizes:
        raise CaptureError(
            f"tensors of the batch have shapes {[tuple(t.shape) for t in tensors]}: the first "
            "dimension of each must be the samples"
        )
    return sizes.pop()


# -----------------------------------------------------------------------------
# What autocast makes of dtypes, spelled out per stage.

_LOWER = frozenset(
    [
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "addmm",
        "addmv",
        "addr",
        "addbmm",
        "baddbmm",
        "mm",
        "mv",
        "bmm",
        "matmul",
        "einsum",
        "scaled_dot_product_attention",
    ]
)
_FULL = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "softplus",
        "prod",
        "cumprod",
        "cumsum",
        "sum",
        "norm",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "dist",
        "cdist",
        "pdist",
        "renorm",
        "logsumexp",
        "cosine_similarity",
        "kl_div",
        "binary_cross_entropy_with_logits",
        "layer_norm",
        "group_norm",
        "softmax",
        "log_softmax",
    ]
)
"""Functions that ``torch.autocast`` casts on GPUs, beside losses, where no rule says it already."""


class Autocast:
    """Casts of one step.

    Matrix products and convolutions run in the lower dtype, normalisations and losses in float32,
    the rest in the widest dtype of what it is given, as ``torch.autocast`` has it on GPUs.

    Args:
        dtype: the lower one; ``None``: nothing is cast.

    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._lower = None if dtype is None else str(dtype).removeprefix("torch.")

    def apply(self, lowered: Lowered, call: Call) -> str:
        """Note in the stage what it casts to; return the dtype of its output."""
        if lowered.kind in ("constant", "random"):
            return str(lowered.attributes["dtype"])
        if self._lower is None or not _floating(call.dtype) or lowered.kind == "cast":
            return call.dtype
        precision = self._of(lowered, call)
        if precision == "lower" and call.dtype == "float32":
            lowered.attributes["cast"] = self._lower
            return self._lower
        if precision == "full" and call.dtype == "float32":
            lowered.attributes["cast"] = "float32"
            return "float32"
        dtypes = [v.dtype for v, _ in lowered.operands if _floating(v.dtype)]
        dtypes += [v.dtype for v, _ in lowered.parameters.values() if _floating(v.dtype)]
        if lowered.kind in ("batch_norm", "embedding", "embedding_bag"):
            dtypes = dtypes[:1]  # the input decides; a table is the only one that is floating
        if not dtypes or call.dtype != "float32":
            return call.dtype
        widest: torch.dtype = getattr(torch, dtypes[0])
        for name in dtypes[1:]:
            widest = torch.promote_types(widest, getattr(torch, name))
        return str(widest).removeprefix("torch.")

    def _of(self, lowered: Lowered, call: Call) -> str:
        if lowered.precision != "keep":
            return lowered.precision
        if call.name in _LOWER:
            return "lower"
        if call.name in _FULL or call.name.endswith("_loss"):
            return "full"
        # the widest: what is not called by a rule of ours may not take mixed dtypes
        dtypes = {v.dtype for v, _ in lowered.operands if _floating(v.dtype)}
        return "full" if lowered.kind in (WHOLE, "call") and len(dtypes) > 1 else "keep"


def _floating(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


# -----------------------------------------------------------------------------
# Checks of single calls: what no plan would do right is refused by the line of the user's code.


_NO_FUNCTIONS = {
    "wrap_with_autocast": "autocast inside the model would be lost; let the job name the dtype "
    "(Job.autocast_dtype), which casts the whole step",
    "lazy_load_decompositions": "torch.vmap and torch.func transform functions, which a graph does "
    "not show; write it with a batch dimension",
}
"""What else a traced program calls, by a part of its name."""


def schema_name(node: fx.Node) -> str:
    """Name of the function that is called.

    Raises:
        CaptureError: it is none of torch's functions on tensors.

    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        name = str(getattr(node.target, "__name__", node.target))
        words = next((text for part, text in _NO_FUNCTIONS.items() if part in name), "")
        words = words or f"{name} is no function on tensors"
        raise CaptureError(f"{words}; {place_of(node)}")
    return str(schema.name.split("::")[1])


def require_tensors(
    node: fx.Node, name: str, values: Container[fx.Node], counted: Container[fx.Node]
) -> None:
    """Refuse what reads a number that a step computes, or a buffer that it counts in."""
    for source in node.all_input_nodes:
        if source in counted:
            raise CaptureError(f"{name} reads a buffer that the step changes; {place_of(node)}")
        if source not in values:
            raise CaptureError(
                f"{name} takes a number from {source.name}, which would be another in each "
                f"step; keep it a tensor; {place_of(node)}"
            )


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of what a function gives, empty where that is no tensor.

    Raises:
        CaptureError: the shape depends on values.

    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    if any(isinstance(size, torch.SymInt) and size.node.hint is None for size in value.shape):
        raise CaptureError(
            f"{node.target} gives a tensor whose shape depends on values, so that it would be "
            "another in each step; choose without changing the shape, as by torch.where or by "
            f"multiplying by a mask; {place_of(node)}"
        )
    return tuple(int(size) for size in value.shape)


def require_same_dtype(node: fx.Node) -> None:
    """Refuse what casts by writing in place: a new tensor would be of another type."""
    written = node.meta["val"]
    if dtype_out_of_place(node) != written.dtype:
        raise CaptureError(
            f"{node.target} writes into a tensor of {dtype_name(written)} what would be of "
            f"another type; cast it before; {place_of(node)}"
        )


def require_real(node: fx.Node, dtype: str) -> None:
    """Refuse complex numbers where gradients are needed."""
    if dtype.startswith("complex"):
        raise CaptureError(
            f"{schema_name(node)} gives complex numbers that depend on parameters, whose "
            f"gradients are not moved between devices; write it with real ones; {place_of(node)}"
        )


def unsplit(node: fx.Node, name: str) -> CaptureError:
    """What draws random numbers, and has no rule for the mask of one part."""
    return CaptureError(
        f"{name} draws random numbers in a form that has no rule for splitting it; {place_of(node)}"
    )


# -----------------------------------------------------------------------------
# In-place operations of a traced program.


class InPlaceOperations:
    """Which calls are in place, and that nobody sees the difference.

    Args:
        nodes: of the program, in order.
        buffers: placeholders of the model's buffers.

    Attributes:
        calls: those that may be replaced by what they are without writing.
        skipped: calls that count steps in a buffer; ``counters`` has them.
        counters: buffers and what a step adds.

    Raises:
        CaptureError: a written tensor, or a view of it, is used afterwards by its old name.

    """

    def __init__(self, nodes: Sequence[fx.Node], buffers: Mapping[str, str]) -> None:
        self.calls: set[fx.Node] = set()
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
            self.calls.add(node)
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
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if value is not None and argument.alias_info is not None and argument.alias_info.is_write:
            raise CaptureError(
                f"{node.target} writes into its {argument.name}; write its result to a new tensor "
                f"instead; {place_of(node)}"
            )


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor whose memory the result may share."""
    if node.target is operator.getitem:
        first = node.args[0]
        made = _schema(first) if isinstance(first, fx.Node) else None
        new = made is not None and all(
            r.alias_info is None and str(r.type) == "Tensor" for r in made.returns
        )
        return first if isinstance(first, fx.Node) and not new else None
    schema = _schema(node)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    views = any(r.alias_info is not None for r in schema.returns)
    may_share = schema.name.split("::")[1] in ("reshape", "flatten", "contiguous", "to", "dropout")
    return node.args[0] if views or may_share else None


def _adds(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.add_")
