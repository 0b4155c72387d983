"""From a traced program to the graph of operators."""

from __future__ import annotations

import operator as operators
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from perfsearch.parallel.soap import (  # noqa: F401
    rules_norm,
    rules_shape,
    rules_window,
)
from perfsearch.parallel.soap.assembly import assemble
from perfsearch.parallel.soap.axes import Whole
from perfsearch.parallel.soap.captured import Captured
from perfsearch.parallel.soap.draft import Draft
from perfsearch.parallel.soap.graph import INPUT, WHOLE, Parameter, Role
from perfsearch.parallel.soap.lowering import (
    RULES,
    TAKE_PARAMETERS,
    Call,
    Lowered,
    Slot,
    Value,
    same,
)
from perfsearch.parallel.soap.precision import Autocast
from perfsearch.parallel.soap.refusals import (
    require_real,
    require_same_dtype,
    require_tensors,
    schema_name,
    shape_of,
    unsplit,
)
from perfsearch.parallel.soap.rules_dense import embedding_bag
from perfsearch.parallel.soap.rules_loss import LOSSES, total
from perfsearch.parallel.soap.rules_pointwise import pointwise
from perfsearch.parallel.soap.traced import (
    batch_size,
    draws,
    dtype_name,
    gives_many,
    least_flops,
    loss_and_scale,
    module_of,
    out_of_place,
    place_of,
)
from perfsearch.parallel.soap.tracing import CaptureError, Loss, Program, trace
from perfsearch.parallel.soap.writes import Writes

_CHECKS = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_size"})
_HAVE_RULES = frozenset({"dropout", "scaled_dot_product_attention"})
_DRAWING = frozenset({"dropout", "attention"})


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


@dataclass
class _Capture:
    program: Program
    trained: dict[str, nn.Parameter]
    autocast: Autocast
    values: dict[fx.Node, Value] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    sources: dict[str, Call] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)

    def run(self) -> Captured:
        nodes = list(self.program.graph.nodes)
        whole_output = next(n for n in nodes if n.op == "output").args[0]
        while isinstance(whole_output, list | tuple):
            whole_output = whole_output[0]
        self.output, self.scale = loss_and_scale(whole_output, LOSSES)
        self.writes = Writes(nodes, self.program.buffers)
        self.batch = batch_size(nodes, self.program.leaves)
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "call_function" and node not in self.writes.skipped:
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
            counters=self.writes.counters,
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
        call = self._as_call(node)
        self.calls[node] = call
        if call.name in _CHECKS or (call.name != "getitem" and gives_many(node)):
            return
        if draws(node) and call.name not in _HAVE_RULES:
            raise unsplit(node, call.name)
        lowered = self._lower(call)
        if lowered is None and call.name in _HAVE_RULES and call.get("dropout_p"):
            raise unsplit(node, call.name)
        lowered = lowered or self._fallback(call)
        self._add(node, call, lowered)

    def _as_call(self, node: fx.Node) -> Call:
        if node.target is operators.getitem:
            made, index = node.args
            if made in self.values:
                raise CaptureError(f"a tensor is indexed outside torch; {place_of(node)}")
            arguments: dict[str, Any] = {"made": self.calls[made], "index": index}
            name = "getitem"
        else:
            name = schema_name(node)
            if name not in _CHECKS:
                require_tensors(node, name, self.values, self.writes.skipped)
            arguments = self._arguments(node)
        value = node.meta.get("val")
        if node in self.writes.in_place:
            name = name.removesuffix("_")
            require_same_dtype(node)
        return Call(
            name=name,
            target=out_of_place(node.target) if node in self.writes.in_place else node.target,
            arguments=arguments,
            shape=shape_of(node),
            dtype=dtype_name(value) if isinstance(value, torch.Tensor) else "",
            is_output=node is self.output,
            sources=self.sources,
        )

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        schema = node.target._schema.arguments
        given: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
        given.update({a.name: v for a, v in zip(schema, node.args, strict=False)})
        given.update(node.kwargs)
        return {a.name: self._value(given[a.name]) for a in schema if a.name in given}

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values.get(argument, self.calls.get(argument))
        if isinstance(argument, list | tuple):
            return [self._value(part) for part in argument]
        return argument

    def _lower(self, call: Call) -> Lowered | None:
        if call.is_output and call.name in ("mean", "sum") and call.get("dim") is None:
            return total(call)
        made = call.get("made")
        if isinstance(made, Call) and made.name == "embedding_bag":
            if call["index"] == 0:
                return embedding_bag(replace(made, shape=call.shape, dtype=call.dtype))
            return None
        rule = RULES.get(call.name)
        if rule is None:
            tags = getattr(call.target, "tags", ())
            return pointwise(call) if torch.Tag.pointwise in tags else None
        if call.name in TAKE_PARAMETERS:
            lowered = rule(call)
            if lowered is not None:
                return lowered
        return rule(self._without_parameters(call))

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
        """The function as it stands, whole, on one device."""
        call = self._without_parameters(call)
        output = None
        if call.name == "getitem":
            output, call = call["index"], call["made"]
        lowered = Lowered(WHOLE, (Role.ATTRIBUTE,) * 0, ())
        lowered.attributes = {
            "target": str(call.target),
            "arguments": {n: self._slots(v, lowered) for n, v in call.arguments.items()},
            "output": output,
        }
        lowered.flops = least_flops(call, lowered)
        return lowered

    def _slots(self, argument: Any, lowered: Lowered) -> Any:
        if isinstance(argument, list | tuple):
            return [self._slots(part, lowered) for part in argument]
        if not isinstance(argument, Value):
            return argument
        slot = lowered.operand(argument, [Whole(size) for size in argument.shape])
        assert isinstance(slot, Slot)
        return slot

    def _add(self, node: fx.Node, call: Call, lowered: Lowered) -> None:
        if lowered.kind == WHOLE:
            lowered.labels = (Role.ATTRIBUTE,) * len(call.shape)
            lowered.splittable = (False,) * len(call.shape)
        dtype = self.autocast.apply(lowered, call)
        if node is self.output and self.scale != 1.0:
            lowered.attributes["scale"] = self.scale
        drawn = lowered.kind in _DRAWING and lowered.attributes["probability"] > 0
        local = not drawn and lowered.kind != "batch_norm"
        local = local and all(value.local for value, _ in lowered.operands)
        # what only parameters and places decide is computed wherever it is needed, as in data
        # parallelism; what depends on samples and has parameters is placed
        sampled = any(value.sampled for value, _ in lowered.operands)
        weighted = bool(lowered.parameters) or any(v.weighted for v, _ in lowered.operands)
        local = local and not (sampled and weighted)
        shape = call.shape if lowered.shape is None else lowered.shape
        strides = node.meta["val"].stride() if lowered.shape is None else ()
        value = Value(
            node.name,
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
        self.values[node] = value
        self.sources[node.name] = call
        self._append(node.name, value, lowered, module_of(node), place_of(node))

    def _append(self, name: str, value: Value, lowered: Lowered, module: str, place: str) -> None:
        parameters = tuple(
            Parameter(n, v.shape, v.dtype, v.name, axes, v.trained)
            for n, (v, axes) in lowered.parameters.items()
        )
        self.drafts.append(Draft(name, lowered.kind, value, lowered, parameters, module, place))
