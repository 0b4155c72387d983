"""From a traced program to the graph of operators."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

# Their rules register themselves.
import perfsearch.soap.rules.dense
import perfsearch.soap.rules.shape
import perfsearch.soap.rules.window  # noqa: F401
from perfsearch.soap.capture.lower import (
    RULES,
    TAKE_PARAMETERS,
    Autocast,
    Call,
    InPlaceOperations,
    Lowered,
    Slot,
    Value,
    batch_size,
    counted_flops,
    draws_random,
    dtype_name,
    gives_many,
    loss_and_scale,
    module_of,
    out_of_place,
    place_of,
    require_real,
    require_same_dtype,
    require_tensors,
    same,
    schema_name,
    shape_of,
    unsplit,
)
from perfsearch.soap.capture.samples import Packed, packed, sample_split
from perfsearch.soap.capture.trace import CaptureError, Loss, Program, trace
from perfsearch.soap.graph import (
    INPUT,
    WHOLE,
    Block,
    Graph,
    Operator,
    Parameter,
    Role,
    Same,
    Shape,
    Stage,
    Whole,
)
from perfsearch.soap.parts import is_real
from perfsearch.soap.rules.base import read, sizes
from perfsearch.soap.rules.loss import LOSSES, total
from perfsearch.soap.rules.norm import by_indices
from perfsearch.soap.rules.pointwise import pointwise
from perfsearch.soap.rules.random import DRAWN, can_draw, draws
from perfsearch.soap.rules.recurrent import CELL, CELLS, recurrent, sample_dim
from perfsearch.soap.rules.shape import selected

_CHECKS = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_size"})
_HAVE_RULES = frozenset({"dropout", "feature_dropout", "scaled_dot_product_attention"})
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions that draw by an argument, their dropout, which torch has no tag for."""

_VIEWS = frozenset({"broadcast_tensors", "unbind", "split", "split_with_sizes", "chunk"})
"""Functions that give several tensors, each of which is computed by itself."""

_SELECTIONS = frozenset({"topk", "sort", "max", "min", "kthvalue", "median", "mode"})
"""Functions that give values and their indices: the values are picked by the indices."""


def capture(
    model: nn.Module, loss: Loss, batch: Any, autocast: torch.dtype | None = None
) -> Captured:
    """Capture a training step.

    Args:
        model: unmodified, in the mode that it is trained in; may be on any device.
        loss: mean loss of the model on a batch.
        batch: of the global batch's size.
        autocast: dtype that the step is cast to where that is safe; ``None``: nothing is.

    Raises:
        CaptureError: it cannot be traced, or draws or writes what cannot be split.

    """
    program = trace(model, loss, batch)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return _Capture(program, parameters, Autocast(autocast)).run()


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


@dataclass
class _Capture:
    program: Program
    trained: dict[str, nn.Parameter]
    autocast: Autocast
    values: dict[fx.Node, Value] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    sources: dict[str, Call] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    given: dict[fx.Node, dict[int, Value]] = field(default_factory=dict)
    packs: dict[tuple[fx.Node, int], tuple[Value, Packed]] = field(default_factory=dict)
    stacks: set[fx.Node] = field(default_factory=set)

    def run(self) -> Captured:
        nodes = list(self.program.graph.nodes)
        whole_output = next(n for n in nodes if n.op == "output").args[0]
        while isinstance(whole_output, list | tuple):
            whole_output = whole_output[0]
        self.output, self.scale = loss_and_scale(whole_output, LOSSES)
        self.in_place = InPlaceOperations(nodes, self.program.buffers)
        self.batch = batch_size(nodes, self.program.leaves)
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "call_function" and node not in self.in_place.skipped:
                self._call(node)
                if node is self.output and self.drafts[-1].kind != WHOLE:
                    break  # what follows is its factor, or not needed for it
                if node is self.output:
                    self.output, self.scale = whole_output, 1.0
        if self.output not in self.values:
            raise CaptureError("the loss does not depend on the model by tensors")
        graph = assemble(self.drafts, self.values[self.output].name, self.batch)
        named = {d.name for d in self.drafts if d.kind == INPUT}
        return Captured(
            graph=graph,
            leaves=tuple(self.program.leaves),
            buffers={p: n for p, n in self.program.buffers.items() if p in named},
            constants=self.program.constants,
            counters=self.in_place.counters,
            tracer=self.program.tracer,
        )

    def _placeholder(self, node: fx.Node) -> None:
        name, program = node.name, self.program
        if name in program.parameters:
            tensor = self.trained[program.parameters[name]]
            # of a tied tensor, the first of its names
            key = next(n for n, other in self.trained.items() if other is tensor)
            labels = (Role.PARAMETER,) * tensor.dim()
            self.values[node] = Value(
                key, tuple(tensor.shape), dtype_name(tensor), labels, True, tensor.requires_grad
            )
            return
        tensor = node.meta["val"] if "val" in node.meta else program.constants.get(name)
        if tensor is None:
            return  # a function of its own, which is refused where it is called
        shape = tuple(int(size) for size in tensor.shape)
        leaf = name in program.leaves
        labels = tuple(
            Role.SAMPLE if leaf and dim == 0 else Role.ATTRIBUTE for dim in range(len(shape))
        )
        self.values[node] = Value(name, shape, dtype_name(tensor), labels, local=True, sampled=leaf)
        self.drafts.append(Draft(name, INPUT, self.values[node], None, (), "", ""))

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.given:
            self._take(node)
            return
        call = self._as_call(node)
        self.calls[node] = call
        if call.name in _CHECKS:
            return
        self._require_drawn_alike(node, call)
        if call.name != "getitem" and gives_many(node):
            if call.name not in _VIEWS and isinstance(node.meta.get("val"), tuple | list):
                self._several(node, call)
            return
        lowered = self._lower(call)
        if lowered is None and call.name in _HAVE_RULES and call.get("dropout_p"):
            raise unsplit(node, call.name)
        self._add(node, call, lowered or self._fallback(call))

    def _require_drawn_alike(self, node: fx.Node, call: Call) -> None:
        """Refuse what draws numbers that a part could not draw as the whole does."""
        has_rule = call.name in _HAVE_RULES | _RECURRENT or call.name in DRAWN
        if draws_random(node) and not has_rule:
            raise unsplit(node, call.name)
        if call.name in DRAWN and not can_draw(call):
            raise unsplit(node, call.name)
        drops = call.name in _RECURRENT and call.get("train") and call.get("dropout")
        if drops and "input" not in call.arguments:
            raise unsplit(node, call.name)

    # Functions that give several tensors.

    def _several(self, node: fx.Node, call: Call) -> None:
        """Run it once, whichever of its tensors are used."""
        self.given[node] = {}
        used = sorted({u.args[1] for u in node.users if u.target is operator.getitem and u.users})
        by_dtype: dict[str, list[int]] = {}
        for number in used:
            by_dtype.setdefault(dtype_name(node.meta["val"][number]), []).append(number)
        if used == [0, 1] and call.name in _SELECTIONS and call.get("dim") is not None:
            self._select(node, call)
            return
        for i, numbers in enumerate(by_dtype.values()):
            name = node.name if not i else f"{node.name}_{i}"
            # of one type are one tensor; others are computed again, which none that draw need
            made = [self._one_of(node, call, number) for number in numbers]
            if len(made) == 1:
                lowered = self._lower(made[0]) or self._fallback(made[0])
                tensor = node.meta["val"][numbers[0]]
                self.given[node][numbers[0]] = self._add(
                    node, made[0], lowered, name, tensor.stride()
                )
            elif not self._stack(node, made, name):
                self._pack(node, call, made, name)

    def _one_of(self, node: fx.Node, call: Call, number: int) -> Call:
        tensor = node.meta["val"][number]
        shape = tuple(int(size) for size in tensor.shape)
        return replace(call, shape=shape, dtype=dtype_name(tensor), output=number)

    def _select(self, node: fx.Node, call: Call) -> None:
        """The indices, and the values by them: where several are alike these are the same ones."""
        indices = self._one_of(node, call, 1)
        lowered = self._lower(indices) or self._fallback(indices)
        self.given[node][1] = found = self._add(
            node, indices, lowered, f"{node.name}_indices", node.meta["val"][1].stride()
        )
        values = self._one_of(node, call, 0)
        lowered = by_indices(self._without_parameters(values), found)
        self.given[node][0] = self._add(
            node, values, lowered, node.name, node.meta["val"][0].stride()
        )

    def _stack(self, node: fx.Node, made: Sequence[Call], name: str) -> bool:
        """Both outputs of a cell as one tensor, where its rule says how it is split."""
        if made[0].name not in CELLS:
            return False
        both = replace(made[0], output=None, shape=(len(made), *made[0].shape))
        lowered = self._lower(both)
        if lowered is None:
            return False
        value = self._add(node, both, lowered, name, ())
        self.given[node] = {one.output or 0: value for one in made}
        self.stacks.add(node)
        return True

    def _pack(self, node: fx.Node, call: Call, made: Sequence[Call], name: str) -> None:
        """All outputs of one type as one tensor, of which each is read as it is used."""
        shapes = [(one.output or 0, one.shape) for one in made]
        several = replace(made[0], output=None)
        lowered, samples = self._lower_several(several, shapes)
        layout, shape = packed(shapes, samples)
        lowered.attributes["pack"] = [(part.number, part.samples) for part in layout]
        by_sample = samples[0] is not None
        lowered.labels = (Role.SAMPLE, Role.ATTRIBUTE) if by_sample else (Role.ATTRIBUTE,)
        lowered.splittable = (True, False) if by_sample else (False,)
        value = self._add(node, replace(several, shape=shape), lowered, name, ())
        for part in layout:
            self.given[node][part.number] = value
            self.packs[node, part.number] = (value, part)

    def _lower_several(
        self, call: Call, shapes: Sequence[tuple[int, Shape]]
    ) -> tuple[Lowered, list[int | None]]:
        if call.name in _RECURRENT:
            lowered = recurrent(self._without_parameters(call))
            if lowered is not None:
                return lowered, [sample_dim(call, number) for number, _ in shapes]
        lowered = self._whole(call)
        found = self._over_samples(lowered, [(number, shape) for number, shape in shapes])
        return lowered, [None] * len(shapes) if found is None else list(found)

    def _take(self, node: fx.Node) -> None:
        """One of the tensors that a function gives."""
        made, number = node.args
        if number not in self.given[made]:
            return  # nobody uses it
        if made in self.stacks:
            value = self.given[made][number]
            call = replace(self.calls[made], name="getitem", shape=value.shape[1:])
            self._add(node, replace(call, dtype=value.dtype), selected(value, 0, number))
            return
        if (made, number) not in self.packs:
            self.values[node] = self.given[made][number]
            return
        value, part = self.packs[made, number]
        count = len(part.shape)
        labels = tuple(Role.SAMPLE if d == part.samples else Role.ATTRIBUTE for d in range(count))
        lowered = Lowered("unpack", labels, tuple(d == part.samples for d in range(count)))
        lowered.attributes["samples"] = part.samples
        columns = Block(part.start, part.start + part.width)
        rows = () if part.samples is None else (Same(part.samples),)
        lowered.operand(value, (*rows, columns))
        call = replace(self.calls[made], name="getitem", shape=part.shape, dtype=value.dtype)
        self._add(node, call, lowered)

    def _as_call(self, node: fx.Node) -> Call:
        if node.target is operator.getitem:
            made, index = node.args
            if made in self.values:
                raise CaptureError(f"a tensor is indexed outside torch; {place_of(node)}")
            arguments: dict[str, Any] = {"made": self.calls[made], "index": index}
            name = "getitem"
        else:
            name = schema_name(node)
            if name not in _CHECKS:
                require_tensors(node, name, self.values, self.in_place.skipped)
            arguments = self._arguments(node)
        value = node.meta.get("val")
        target = node.target
        if node in self.in_place.calls and name not in DRAWN:
            name = name.removesuffix("_")
            require_same_dtype(node)
            target = out_of_place(node.target)
        return Call(
            name=name,
            target=target,
            arguments=arguments,
            shape=shape_of(node),
            dtype=dtype_name(value) if isinstance(value, torch.Tensor) else "",
            is_output=node is self.output,
            sources=self.sources,
        )

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        schema = node.target._schema.arguments
        arguments: dict[str, Any] = {
            a.name: a.default_value for a in schema if a.has_default_value()
        }
        arguments.update({a.name: v for a, v in zip(schema, node.args, strict=False)})
        arguments.update(node.kwargs)
        return {a.name: self._value(arguments[a.name]) for a in schema if a.name in arguments}

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values.get(argument, self.calls.get(argument))
        if isinstance(argument, list | tuple):
            return [self._value(part) for part in argument]
        return argument

    def _lower(self, call: Call) -> Lowered | None:
        if call.is_output and call.name in ("mean", "sum") and call.get("dim") is None:
            return total(call)
        rule = RULES.get(call.name)
        lowered = None
        if rule is not None:
            lowered = rule(call) if call.name in TAKE_PARAMETERS else None
            lowered = lowered or rule(self._without_parameters(call))
        if lowered is None and torch.Tag.pointwise in getattr(call.target, "tags", ()):
            lowered = pointwise(call)
        return lowered

    def _without_parameters(self, call: Call) -> Call:
        """Give each parameter an operator of its own, so that it is a tensor like any other."""
        made = call.get("made")
        inner = {"made": self._without_parameters(made)} if isinstance(made, Call) else {}
        arguments = {n: self._as_tensor(v) for n, v in call.arguments.items()}
        return replace(call, arguments={**arguments, **inner})

    def _as_tensor(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [self._as_tensor(part) for part in argument]
        if not isinstance(argument, Value) or not argument.parameter:
            return argument
        name = f"parameter:{argument.name}"
        count = len(argument.shape)
        value = Value(
            name, argument.shape, argument.dtype, argument.labels, local=True, weighted=True
        )
        if all(draft.name != name for draft in self.drafts):
            lowered = Lowered("parameter", argument.labels, (True,) * count)
            lowered.operand(argument, same(count), "value")
            self._append(name, value, lowered, argument.name, "")
        return value

    def _fallback(self, call: Call) -> Lowered:
        """The function as it stands: over samples if that is right, else whole on one device."""
        lowered = self._whole(call)
        lowered.attributes["output"] = call.output
        shape = call.shape
        count = len(shape)
        samples = self._over_samples(lowered, [(call.output, shape)])
        if samples is None:
            lowered.labels = (Role.ATTRIBUTE,) * count
            lowered.splittable = (False,) * count
        else:
            lowered.labels = tuple(
                Role.SAMPLE if d == samples[0] else Role.ATTRIBUTE for d in range(count)
            )
            lowered.splittable = tuple(d == samples[0] for d in range(count))
            lowered.operands = [
                (value, tuple(Same(samples[0]) if isinstance(a, Same) else a for a in axes))
                for value, axes in lowered.operands
            ]
        return lowered

    def _whole(self, call: Call) -> Lowered:
        """The function as it stands, whole."""
        call = self._without_parameters(call)
        lowered = Lowered(WHOLE, (), ())
        lowered.attributes = {
            "target": str(call.target),
            "arguments": {n: self._slots(v, lowered) for n, v in call.arguments.items()},
        }
        lowered.flops = counted_flops(call, lowered)
        return lowered

    def _over_samples(
        self, lowered: Lowered, outputs: Sequence[tuple[int | None, Shape]]
    ) -> tuple[int, ...] | None:
        """Have it read no more than its samples, if they do not know of each other.

        Returns:
            The outputs' dimensions of samples; axes of operands are those of a first dimension.

        """
        values = [value for value, _ in lowered.operands]
        found = sample_split(lowered.attributes, values, outputs, lowered.flops)
        if found is None:
            return None
        lowered.kind = "call"
        lowered.operands = [
            (value, tuple(Same(0) if d == dim else axis for d, axis in enumerate(axes)))
            for (value, axes), dim in zip(lowered.operands, found.operands, strict=True)
        ]
        return found.outputs

    def _slots(self, argument: Any, lowered: Lowered) -> Any:
        if isinstance(argument, list | tuple):
            return [self._slots(part, lowered) for part in argument]
        if not isinstance(argument, Value):
            return argument
        slot = lowered.operand(argument, [Whole(size) for size in argument.shape])
        assert isinstance(slot, Slot)
        return slot

    def _add(
        self,
        node: fx.Node,
        call: Call,
        lowered: Lowered,
        name: str = "",
        strides: tuple[int, ...] | None = None,
    ) -> Value:
        name = name or node.name
        dtype = self.autocast.apply(lowered, call)
        if node is self.output and self.scale != 1.0:
            lowered.attributes["scale"] = self.scale
        local = not (draws(lowered) and lowered.operands) and lowered.kind != "batch_norm"
        local = local and all(value.local for value, _ in lowered.operands)
        # what only parameters and places decide is computed wherever it is needed, as in data
        # parallelism; what depends on samples and has parameters is placed
        sampled = any(value.sampled for value, _ in lowered.operands)
        weighted = bool(lowered.parameters) or any(v.weighted for v, _ in lowered.operands)
        local = local and not (sampled and weighted)
        shape = call.shape if lowered.shape is None else lowered.shape
        if strides is None:
            strides = node.meta["val"].stride() if lowered.shape is None else ()
        value = Value(
            name,
            shape,
            dtype,
            lowered.labels,
            local=local,
            strides=strides,
            sampled=sampled,
            weighted=weighted,
        )
        if weighted:
            require_real(node, dtype)
        if node.meta.get("merged_rows"):
            lowered.attributes["merged_rows"] = True
        if lowered.kind == "random":
            lowered.attributes["order"] = value.memory_order
        self.values[node] = value
        self.sources[name] = call
        self._append(name, value, lowered, module_of(node), place_of(node))
        return value

    def _append(self, name: str, value: Value, lowered: Lowered, module: str, place: str) -> None:
        parameters = tuple(
            Parameter(n, v.shape, v.dtype, v.name, axes, v.trained)
            for n, (v, axes) in lowered.parameters.items()
        )
        self.drafts.append(Draft(name, lowered.kind, value, lowered, parameters, module, place))


# -----------------------------------------------------------------------------
# From lowered calls to operators: what belongs together is joined, and everything is named.


@dataclass
class Draft:
    """An operator in the making.

    Attributes:
        name: of the traced call.
        kind: of the first stage.
        value: the output.
        lowered: the first stage; ``None`` for inputs.
        parameters: of the first stage.
        module: path of the module that calls it.
        place: in the user's code.
        followers: stages that were joined.
        output: of the last stage.

    """

    name: str
    kind: str
    value: Value
    lowered: Lowered | None
    parameters: tuple[Parameter, ...]
    module: str
    place: str
    followers: list[Draft] = field(default_factory=list)

    @property
    def stages(self) -> list[Draft]:
        """The first and those that follow."""
        return [self, *self.followers]

    @property
    def output(self) -> Value:
        """Of the last stage."""
        return self.stages[-1].value


_JOINED = frozenset({"pointwise", "cast", "dropout", "reshape", "permute", "expand"})
"""Kinds that are computed with their only input's operator."""

_ELEMENTWISE = frozenset({"pointwise", "cast", "dropout"})
_ONLY_ELEMENTWISE = frozenset({"batch_norm"})
"""Heads whose parts must not overlap, as those behind a reshape may."""

_ALONE = frozenset({"whole", "elementwise_loss", "class_loss", "total"})


def assemble(drafts: Sequence[Draft], output: str, batch: int) -> Graph:
    """Join, drop what the loss does not need, name, and put together.

    Args:
        drafts: in the order of the program.
        output: name of the loss's draft.
        batch: samples.

    """
    needed = _needed(drafts, output)
    _freeze(drafts, output)
    kept = [d for d in drafts if d.name in needed]
    _split_cells(kept)
    joined, owner = _join(kept, output)
    names = _names(joined)
    final = {old: names[head] for old, head in owner.items()}
    operators = tuple(_operator(draft, names[draft.name], final) for draft in joined)
    local = frozenset(names[d.name] for d in joined if d.value.local)
    return Graph(operators, local, final[output], batch)


def _needed(drafts: Sequence[Draft], output: str) -> set[str]:
    by_name = {draft.name: draft for draft in drafts}
    needed: set[str] = set()
    # what is drawn is drawn, whether the loss needs it or not
    drawn = [d.name for d in drafts if d.lowered is not None and draws(d.lowered)]
    waiting = [output, *drawn]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        lowered = by_name[name].lowered
        if lowered is not None:
            waiting += [value.name for value, _ in lowered.operands]
    return needed | {d.name for d in drafts if d.kind == INPUT}


def _freeze(drafts: Sequence[Draft], output: str) -> None:
    """Parameters that the loss has no gradient by are not trained: theirs is none, not zero."""
    reached = {output}
    trained: set[str] = set()
    for draft in reversed(drafts):
        lowered = draft.lowered
        if lowered is None or draft.name not in reached:
            continue
        if lowered.attributes.get("detach") or not is_real(draft.value.dtype):
            continue
        reached |= {value.name for value, _ in lowered.operands}
        trained |= {parameter.key for parameter in draft.parameters}
    for draft in drafts:
        draft.parameters = tuple(
            replace(p, trained=p.trained and p.key in trained) for p in draft.parameters
        )


def _join(drafts: Sequence[Draft], output: str) -> tuple[list[Draft], dict[str, str]]:
    uses = Counter(
        value.name for d in drafts if d.lowered is not None for value, _ in d.lowered.operands
    )
    readers = Counter(p.key for d in drafts for p in d.parameters)
    owner: dict[str, str] = {}
    heads: dict[str, Draft] = {}
    drawn_since: set[str] = set()  # heads behind which another operator draws
    for draft in drafts:
        head = _head(draft, owner, heads, uses)
        if draft.lowered is not None and draws(draft.lowered):
            if head is not None and head.name in drawn_since:
                head = None  # numbers are drawn in the order of the program
            drawn_since |= set(heads) - {head.name if head is not None else ""}
        if head is None:
            heads[draft.name] = draft
            owner[draft.name] = draft.name
        elif takes_apart(head, draft, readers):
            take_apart(head, draft)
            owner[draft.name] = head.name
        else:
            head.followers.append(draft)
            owner[draft.name] = head.name
    return list(heads.values()), owner


def _head(
    draft: Draft, owner: Mapping[str, str], heads: Mapping[str, Draft], uses: Mapping[str, int]
) -> Draft | None:
    """The operator that a draft is computed with."""
    lowered = draft.lowered
    if lowered is None or draft.kind not in _JOINED or draft.parameters:
        return None
    if len(lowered.operands) != 1:
        return None
    before = lowered.operands[0][0]
    head = heads[owner[before.name]]
    if uses[before.name] != 1 or head.kind == INPUT or head.value.local or head.kind in _ALONE:
        return None
    if head.kind in _ONLY_ELEMENTWISE and draft.kind not in _ELEMENTWISE:
        return None
    return head


def _names(drafts: Sequence[Draft]) -> dict[str, str]:
    """The path of the module that owns the parameters, else that of the caller and the kind."""
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for draft in drafts:
        name = draft.name
        if draft.kind == "parameter":
            name = draft.parameters[0].key
        elif draft.parameters and draft.parameters[0].name in ("weight", "bias"):
            name = draft.module or draft.parameters[0].key.rpartition(".")[0] or draft.kind
        elif draft.kind != INPUT:
            label = draft.name if draft.kind in ("pointwise", "call", "whole", CELL) else draft.kind
            name = f"{draft.module}.{label}" if draft.module else label
        taken[name] += 1
        names[draft.name] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return names


def _operator(draft: Draft, name: str, final: Mapping[str, str]) -> Operator:
    if draft.lowered is None:
        value = draft.value
        return Operator(name, INPUT, (), (), value.shape, value.dtype, (None,) * len(value.shape))
    stages = tuple(_stage(part) for part in draft.stages)
    operands = draft.lowered.operands
    operator = Operator(
        name=name,
        kind=draft.kind,
        inputs=tuple(final[value.name] for value, _ in operands),
        input_shapes=tuple(value.shape for value, _ in operands),
        shape=draft.output.shape,
        dtype=draft.output.dtype,
        roles=(),
        parameters=draft.parameters,
        stages=stages,
        flops=sum(part.lowered.flops for part in draft.stages if part.lowered is not None),
        source=draft.place,
    )
    return replace(operator, roles=_roles(draft))


def _stage(draft: Draft) -> Stage:
    assert draft.lowered is not None
    return Stage(
        kind=draft.kind,
        shape=draft.value.shape,
        reads=tuple(axes for _, axes in draft.lowered.operands),
        attributes=draft.lowered.attributes,
        dtype=draft.value.dtype,
    )


def _roles(draft: Draft) -> tuple[Role | None, ...]:
    """What each dimension is, where splitting it leaves each part less to compute."""
    labels = draft.output.labels
    return tuple(label if _splits(draft, dim) else None for dim, label in enumerate(labels))


def _splits(draft: Draft, dim: int) -> bool:
    size = draft.output.shape[dim]
    if size < 2:
        return False
    rectangle = tuple(
        (0, -(-size // 2) if d == dim else full) for d, full in enumerate(draft.output.shape)
    )
    for part in reversed(draft.stages):
        assert part.lowered is not None
        shape = part.value.shape
        narrowed = [
            d for d, (n, full) in enumerate(zip(sizes(rectangle), shape, strict=True)) if n < full
        ]
        if not narrowed or not all(part.lowered.splittable[d] for d in narrowed):
            return False
        if part is not draft:
            before = read(part.lowered.operands[0][1], rectangle)
            assert before is not None
            rectangle = before
    return True


# -----------------------------------------------------------------------------
# Linear layers whose outputs are taken apart at once, as heads are: split by any of the blocks.
# And cells of recurrent layers, whose weights have a block of rows for each gate.
#
# The rows of such a weight lie (projections, heads, width of a head), say. A part that has some
# of the heads reads rows from several places, which are one rectangle of the weight so viewed.


def takes_apart(head: Draft, follower: Draft, readers: Mapping[str, int]) -> bool:
    """Whether a reshape does nothing but split the last dimension of a linear layer.

    Args:
        head: an operator.
        follower: what is to be joined to it.
        readers: how many operators read each parameter; a shared one has one view only.

    """
    lead, _ = _rows_of(head)
    return (
        head.kind == "linear"
        and follower.kind == "reshape"
        and not head.followers
        and len(follower.value.shape) > len(head.value.shape)
        and follower.value.shape[:lead] == head.value.shape[:lead]
        and all(readers[parameter.key] == 1 for parameter in head.parameters)
    )


def take_apart(head: Draft, follower: Draft) -> None:
    """Make the linear layer give what the reshape gave."""
    assert head.lowered is not None
    lead, before = _rows_of(head)
    blocks = follower.value.shape[lead:]
    labels = (*head.value.labels[:lead], *(Role.PARAMETER for _ in blocks))
    head.lowered.labels = labels
    head.lowered.splittable = (True,) * len(labels)
    head.lowered.attributes["blocks"] = len(blocks)
    head.parameters = tuple(_viewed(p, lead, blocks, before) for p in head.parameters)
    head.value = replace(follower.value, labels=labels)


def _split_cells(drafts: Sequence[Draft]) -> None:
    """Let cells be split over hidden elements, where no other function reads their weights.

    A weight is seen one way by all that read it: here as blocks of rows, one block a gate.
    """
    cells = [draft for draft in drafts if draft.kind == CELL]
    readers: dict[str, set[Any]] = {}
    for draft in drafts:
        for parameter in draft.parameters:
            seen = (parameter.name, _gates(draft)) if draft.kind == CELL else draft.name
            readers.setdefault(parameter.key, set()).add(seen)
    otherwise = {key for key, seen in readers.items() if len(seen) > 1}
    count = -1
    while len(otherwise) > count:  # until no cell has some of its weights so, and others not
        count = len(otherwise)
        for draft in cells:
            keys = {parameter.key for parameter in draft.parameters}
            otherwise |= keys if keys & otherwise else set()
    for draft in cells:
        if otherwise.isdisjoint(parameter.key for parameter in draft.parameters):
            _view_by_gate(draft)


def _gates(draft: Draft) -> int:
    assert draft.lowered is not None
    return CELLS[draft.lowered.attributes["function"]]


def _view_by_gate(draft: Draft) -> None:
    assert draft.lowered is not None
    gates, hidden = _gates(draft), draft.value.shape[-1]
    rows = (Whole(gates), Same(len(draft.value.shape) - 1))
    draft.parameters = tuple(
        replace(p, shape=(gates, hidden, *p.shape[1:]), axes=(*rows, *p.axes[1:]))
        for p in draft.parameters
    )
    draft.lowered.attributes["gates"] = gates
    draft.lowered.splittable = (*draft.lowered.splittable[:-1], True)


def _rows_of(head: Draft) -> tuple[int, int]:
    """Dimensions before those of the weight's rows, and how many these are by now."""
    assert head.lowered is not None
    count = int(head.lowered.attributes.get("blocks", 1))
    return len(head.value.shape) - count, count


def _viewed(parameter: Parameter, lead: int, blocks: Shape, before: int) -> Parameter:
    rows = tuple(Same(lead + i) for i in range(len(blocks)))
    return replace(
        parameter,
        shape=(*blocks, *parameter.shape[before:]),
        axes=(*rows, *parameter.axes[before:]),
    )
