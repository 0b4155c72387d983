"""An unmodified model and its loss as a program of torch functions."""

from __future__ import annotations

import operator as operators
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from perfsearch.parallel.soap.nested import inline_without_gradients
from perfsearch.parallel.soap.unseen import Attribute, Unseen

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
    unseen = Unseen(module.model)
    try:
        with unseen.watch():
            try:
                program = _exported(module, leaves)
            except Exception as error:
                try:
                    program = _traced(module, leaves)
                except Exception as second:
                    raise CaptureError(_why_neither(error, second)) from second
    except CaptureError:
        if not unseen.found:
            raise
    if unseen.found:
        raise CaptureError(unseen.found[0])
    if any(isinstance(tensor, FakeTensor) for tensor in program.constants.values()):
        raise CaptureError(
            "a tensor that the step computes would be a constant, as by .data; use detach()"
        )
    return program, unseen.moved


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


def _exported(module: _Whole, leaves: list[torch.Tensor]) -> Program:
    program = torch.export.export(module, tuple(leaves), strict=False)
    inline_without_gradients(program.graph)
    signature = program.graph_signature
    constants = {**program.constants}
    # non-persistent buffers are among the constants too; the model has them under their names
    buffers = {p: _strip(n) for p, n in signature.inputs_to_buffers.items()}
    lifted = {
        placeholder: constants[name]
        for placeholder, name in signature.inputs_to_lifted_tensor_constants.items()
    }
    return Program(
        graph=program.graph,
        parameters={p: _strip(n) for p, n in signature.inputs_to_parameters.items()},
        buffers=buffers,
        leaves=list(signature.user_inputs),
        constants=lifted,
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
    made = make_fx(step, tracing_mode="fake", pre_dispatch=True)(*tensors)
    places = [node.name for node in made.graph.nodes if node.op == "placeholder"]
    lifted = {}
    for node in made.graph.nodes:
        if node.op == "get_attr":
            lifted[node.name] = operators.attrgetter(node.target)(made)
    return Program(
        graph=made.graph,
        parameters={p: _strip(n) for p, n in zip(places[:count], parameters, strict=True)},
        buffers={p: _strip(n) for p, n in zip(places[count:rest], buffers, strict=True)},
        leaves=places[rest:],
        constants=lifted,
        tracer="fx",
    )
