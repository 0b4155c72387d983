"""An unmodified model and its loss as a program of torch functions."""

from __future__ import annotations

import io
import operator
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Loss = Callable[[nn.Module, Any], torch.Tensor]


class CaptureError(ValueError):
    """The model cannot be captured; the message names the place in the user's code."""


@dataclass(frozen=True)
class Program:
    """What was traced.

    Attributes:
        graph: of torch functions, batch tensors and the model's tensors as placeholders.
        parameters: placeholder to qualified name in the model.
        buffers: placeholder to qualified name in the model, of buffers and constants.
        leaves: placeholders of the batch's tensors, in ``tree_flatten`` order.
        constants: by placeholder, tensors that are neither of the model nor of the batch.
        tracer: ``export`` or ``fx``.

    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    leaves: list[str]
    constants: dict[str, torch.Tensor]
    tracer: str


class _Whole(nn.Module):  # type: ignore[misc]
    """Model and loss as one module of the batch's leaves."""

    def __init__(self, model: nn.Module, loss: Loss, spec: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._spec = spec

    def forward(self, *leaves: Any) -> torch.Tensor:
        """The loss."""
        return self._loss(self.model, tree_unflatten(list(leaves), self._spec))


def trace(model: nn.Module, loss: Loss, batch: Any) -> Program:
    """Trace a training step's forward pass and loss by torch.export, by fx where that fails.

    Args:
        model: in the mode that it is trained in; nothing of it is changed.
        loss: of the model and a batch.
        batch: of the size that is trained; its values are not looked at.

    Raises:
        CaptureError: neither can trace it.

    """
    leaves, spec = tree_flatten(batch)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        odd = next(type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor))
        raise CaptureError(f"the batch holds a {odd}: only tensors can be shared out")
    module = _Whole(model, loss, spec)
    program, moved = _watched(module, leaves)
    if moved:
        # what a first step sets up stays as it is in a second one
        with _as_left(moved):
            program, moved = _watched(module, leaves)
    if moved:
        owner, name = next(iter(moved))
        raise CaptureError(
            f"the forward pass changes {name} of {type(owner).__name__} in each step, and a graph "
            "would have one value of it for all steps; count outside the model"
        )
    return program


@contextmanager
def _as_left(moved: Mapping[Attribute, Any]) -> Iterator[None]:
    """Give attributes the values that a step has left; torch.export takes them back."""
    before = {(owner, name): vars(owner).get(name) for owner, name in moved}
    for (owner, name), value in moved.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def _watched(module: _Whole, leaves: list[torch.Tensor]) -> tuple[Program, dict[Attribute, Any]]:
    """The program, and what the forward pass has changed of its modules' plain attributes."""
    effects = SideEffects(module.model)
    try:
        with effects.watch():
            try:
                program = _exported(module, leaves)
            except Exception as error:
                try:
                    program = _traced(module, leaves)
                except Exception as second:
                    raise CaptureError(_why_neither(error, second)) from second
    except CaptureError:
        if not effects.found:
            raise
    if effects.found:
        raise CaptureError(effects.found[0])
    if any(isinstance(tensor, FakeTensor) for tensor in program.constants.values()):
        raise CaptureError(
            "a tensor that the step computes would be a constant, as by .data (use detach()) or by "
            "autograd.grad within the step (which a graph does not show)"
        )
    return program, effects.moved


def _why_neither(export: Exception, fx_error: Exception) -> str:
    """What the two tracers failed at, and where."""
    where = _line_of(fx_error)
    if "DataDependent" in type(fx_error).__name__:
        return (
            "the model cannot be captured as a graph: its course depends on a number that is read "
            f"from a tensor (float(), .item(), if, a shape){where}; {_first_line(fx_error)}"
        )
    return (
        f"the model cannot be captured as a graph{where}. torch.export: {_first_line(export)}; "
        f"fx: {_first_line(fx_error)}"
    )


def _line_of(error: Exception) -> str:
    """The innermost line on the way to an error that is the user's, or of one of torch's layers."""
    torch_room, layers = str(Path(torch.__file__).parent), str(Path(nn.__file__).parent / "modules")
    own = (str(Path(layers) / "module.py"), __file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        theirs = frame.filename.startswith(f"{torch_room}{os.sep}")
        layer = frame.filename.startswith(f"{layers}{os.sep}")
        if frame.filename not in own and (layer or not theirs) and os.path.isabs(frame.filename):
            return f", at {frame.filename}:{frame.lineno}"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _strip(name: str) -> str:
    return name.removeprefix("model.")


@contextmanager
def _whole_stacks() -> Iterator[None]:
    """Have each call know the line that makes it, and not that of a module's ``forward`` alone."""
    kept = getattr(fx.proxy.TracerBase, "_filter_traceback_frames", None)
    if kept is None:  # before torch 2.9
        yield
        return

    def filtered(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        alone = self._record_forward_stack_traces_only
        self._record_forward_stack_traces_only = False
        try:
            found: traceback.StackSummary = kept(self, frames)
        finally:
            self._record_forward_stack_traces_only = alone
        return found

    fx.proxy.TracerBase._filter_traceback_frames = filtered
    try:
        yield
    finally:
        fx.proxy.TracerBase._filter_traceback_frames = kept


def _exported(module: _Whole, leaves: list[torch.Tensor]) -> Program:
    said = io.StringIO()
    with redirect_stderr(said), _whole_stacks():
        program = torch.export.export(module, tuple(leaves), strict=False)
    sys.stderr.write(said.getvalue())  # of a failure it prints the graph so far, on every rank
    inline_no_grad(program.graph)
    keep_rows_apart(program.graph)
    signature = program.graph_signature
    constants = {**program.constants}
    # non-persistent buffers are among the constants too; the model has them under their names
    buffers = {p: _strip(n) for p, n in signature.inputs_to_buffers.items()}
    lifted = {
        placeholder: constants[name]
        for placeholder, name in signature.inputs_to_lifted_tensor_constants.items()
    }
    written = settle_written_constants(program.graph, lifted)
    return Program(
        graph=program.graph,
        parameters={p: _strip(n) for p, n in signature.inputs_to_parameters.items()},
        buffers=buffers,
        leaves=list(signature.user_inputs),
        constants={**lifted, **written},
        tracer="export",
    )


def _traced(module: _Whole, leaves: list[torch.Tensor]) -> Program:
    """By concrete values: any Python is followed, with the values that it has here."""
    from torch.fx.experimental.proxy_tensor import make_fx

    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    count, rest = len(parameters), len(parameters) + len(buffers)
    names = [*parameters, *buffers]

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        state = dict(zip(names, tensors[:rest], strict=True))
        return torch.func.functional_call(module, state, tensors[rest:])

    tensors = (*parameters.values(), *buffers.values(), *leaves)
    with _whole_stacks():
        made = make_fx(step, tracing_mode="fake", pre_dispatch=True)(*tensors)
    keep_rows_apart(made.graph)
    places = [node.name for node in made.graph.nodes if node.op == "placeholder"]
    lifted = {}
    for node in made.graph.nodes:
        if node.op == "get_attr":
            lifted[node.name] = operator.attrgetter(node.target)(made)
    return Program(
        graph=made.graph,
        parameters={p: _strip(n) for p, n in zip(places[:count], parameters, strict=True)},
        buffers={p: _strip(n) for p, n in zip(places[count:rest], buffers, strict=True)},
        leaves=places[rest:],
        constants=lifted,
        tracer="fx",
    )


# -----------------------------------------------------------------------------
# Higher-order operators, by which torch.export keeps what runs under ``no_grad``, are inlined.


def inline_no_grad(graph: fx.Graph) -> None:
    """Put what is computed under ``no_grad`` into the graph itself, its results detached.

    Other higher-order operators stay, and so do those within these.
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


# -----------------------------------------------------------------------------
# Tensors that neither the batch nor the model decides, as a mask of windows, may be made by writing
# into them: these are computed once, so that what is left writes nothing.

_OF_SHAPE_ALONE = frozenset(
    {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
)
"""Functions that look at no value of what they are given."""


def settle_written_constants(
    graph: fx.Graph, known: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute constant tensors that are written into; a use sees what was written before it.

    Args:
        graph: of the program, changed.
        known: by placeholder, constants that there are already.

    Returns:
        The values, by the names of the nodes that stand for them.

    """
    given = {
        node: known[node.name]
        for node in graph.nodes
        if node.name in known and not isinstance(known[node.name], FakeTensor)
    }
    values: dict[fx.Node, Any] = {node: tensor.clone() for node, tensor in given.items()}
    constant = set(values)
    for node in graph.nodes:
        if node.op == "call_function" and _is_constant(node, constant):
            constant.add(node)
    settled = _with_writes(constant - set(values))
    seen: list[tuple[fx.Node, fx.Node, torch.Tensor]] = []
    for node in graph.nodes:
        if node in settled:
            values[node] = _computed(node, values)
            continue
        sources = [n for n in node.all_input_nodes if n in settled]
        made = [(n, values[n]) for n in sources if isinstance(values[n], torch.Tensor)]
        seen += [(node, source, value.clone()) for source, value in made]
    if any(not torch.equal(values[node], tensor) for node, tensor in given.items()):
        return {}  # a tensor that is kept from step to step
    found: dict[str, torch.Tensor] = {}
    for node, source, value in seen:
        with graph.inserting_before(node):
            stands = graph.create_node("placeholder", f"written_{len(found)}")
        stands.meta["val"] = found[stands.name] = value
        node.replace_input_with(source, stands)
    for node in reversed(list(graph.nodes)):
        if node in settled:
            graph.erase_node(node)
    return found


def _is_constant(node: fx.Node, constant: set[fx.Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.target is not operator.getitem and schema is None:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    if schema is not None and schema.name.split("::")[1] in _OF_SHAPE_ALONE:
        return all(n in constant for n in node.all_input_nodes[1:])
    return all(n in constant for n in node.all_input_nodes)


def _with_writes(constant: set[fx.Node]) -> set[fx.Node]:
    """Of constants those that hang together with one that is written into."""
    beside: dict[fx.Node, set[fx.Node]] = {node: set() for node in constant}
    for node in constant:
        for source in node.all_input_nodes:
            if source in constant:
                beside[node].add(source)
                beside[source].add(node)
    reached = {node for node in constant if _writes(node)}
    waiting = list(reached)
    while waiting:
        for other in beside[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return first is not None and bool(first.is_write)


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a constant is, on the CPU; of what is no constant the type and the shape are enough."""

    def given(argument: fx.Node) -> Any:
        if argument in values:
            return values[argument]
        seen = argument.meta["val"]
        return torch.zeros(seen.shape, dtype=seen.dtype)

    keywords = {k: v for k, v in node.kwargs.items() if k != "device"}
    arguments = fx.node.map_arg(node.args, given)
    assert callable(node.target)
    return node.target(*arguments, **fx.node.map_arg(keywords, given))


# -----------------------------------------------------------------------------
# Linear layers on rows of several dimensions, merged before and taken apart behind: these lose
# which rows are of one sample, where the samples are not the first of the dimensions.


def keep_rows_apart(graph: fx.Graph) -> None:
    """Let ``view(linear(view(x)))`` be the linear layer of ``x`` where only rows were merged."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        merged = node.args[0]
        if merged.target not in views or len(merged.users) > 1 or len(node.users) != 1:
            continue
        source, (apart,) = merged.args[0], node.users
        if apart.target not in views or not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        rows = tuple(apart.meta["val"].shape[:-1])
        narrow, wide = merged.meta["val"], node.meta["val"]
        if tuple(source.meta["val"].shape[: len(rows)]) != rows or len(rows) < 2:
            continue
        if narrow.dim() != 2 or apart.meta["val"].shape[-1] != wide.shape[-1]:
            continue
        merged.args = (source, [*rows, narrow.shape[-1]])
        merged.meta["val"] = narrow.view(*rows, narrow.shape[-1])
        node.meta["val"] = wide.view(*rows, wide.shape[-1])
        node.meta["merged_rows"] = True
        apart.replace_all_uses_with(node)
        graph.erase_node(apart)


# -----------------------------------------------------------------------------
# Side effects of a training step, which a traced program does not show: watched for while it is
# traced.

_OWN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")
_SCALARS = (bool, int, float, str)
Attribute = tuple[nn.Module, str]


class SideEffects:
    """Side effects found in one trace.

    Args:
        model: that is traced.

    Attributes:
        found: what a graph would get wrong, with the line of the user's code; empty: nothing.
        moved: plain attributes of modules that the forward pass changes, and their last values.

    """

    def __init__(self, model: nn.Module) -> None:
        self.found: list[str] = [*_hooks(model)]
        self.moved: dict[Attribute, Any] = {}
        self._first: dict[Attribute, Any] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at what is done within it."""
        drawn = _drawn()
        function, module, tensor = torch.autograd.Function, nn.Module, torch.Tensor
        apply, assign, hook = function.__dict__["apply"], module.__setattr__, tensor.register_hook
        function.apply = classmethod(self._applying(apply.__func__))
        module.__setattr__ = self._assigning(assign)
        tensor.register_hook = self._hooking(hook)
        inference = torch.inference_mode
        enter, inference.__enter__ = inference.__enter__, self._entering(inference.__enter__)
        try:
            yield
        finally:
            inference.__enter__ = enter
            function.apply, module.__setattr__, tensor.register_hook = apply, assign, hook
        for name, state in _drawn().items():
            if state != drawn.get(name, state):
                self.found.append(
                    f"the forward pass draws from {name}, which a graph would do once for all "
                    "steps; draw from torch, or not at all"
                )
        self.moved = {k: v for k, v in self.moved.items() if self._first[k] != v}

    def _applying(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(kind: type, *arguments: Any, **keywords: Any) -> Any:
            if kind.__name__ == "CheckpointFunction":
                self._note("checkpointing with use_reentrant=True; give use_reentrant=False")
            elif not kind.__module__.startswith("torch."):
                self._note(
                    f"{kind.__qualname__} is an autograd.Function, whose own backward pass a "
                    "graph does not have; write it with torch's functions, or detach()"
                )
            return apply(kind, *arguments, **keywords)

        return run

    def _assigning(self, assign: Callable[..., None]) -> Callable[..., None]:
        def run(owner: nn.Module, name: str, value: Any) -> None:
            buffers = owner.__dict__.get("_buffers", {})
            if name in buffers and buffers[name] is not value and _is_users(sys._getframe(1)):
                self._note(
                    f"the forward pass gives buffer {name} of {type(owner).__name__} a new value, "
                    "which a graph would not keep"
                )
            if isinstance(value, _SCALARS) and _is_users(sys._getframe(1)):
                self._first.setdefault((owner, name), vars(owner).get(name))
                self.moved[owner, name] = value
            assign(owner, name, value)

        return run

    def _hooking(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, function: Any) -> Any:
            if _is_users(sys._getframe(1)):
                self._note("a hook on a gradient would not be called")
            return hook(tensor, function)

        return run

    def _entering(self, enter: Callable[..., None]) -> Callable[..., None]:
        def run(mode: torch.inference_mode) -> None:
            if mode.mode:
                self._note("inference_mode would be left out; use no_grad")
            enter(mode)

        return run

    def _note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not _is_users(frame):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "the loss function"
        self.found.append(f"{what}; {place}")


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_OWN)


def _hooks(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or after:
            yield f"parameter {name} has a hook on its gradient, which would not be called"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"module {name or 'itself'} has a backward hook, which would not be called"


def _drawn() -> dict[str, Any]:
    """States of generators that are not torch's."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states
