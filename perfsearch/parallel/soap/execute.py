"""A plan, really run: each rank computes its parts, and gets what it lacks from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.parallel.soap.axes import Rectangle
from perfsearch.parallel.soap.captured import Captured
from perfsearch.parallel.soap.communicators import Communicators
from perfsearch.parallel.soap.configuration import Plan, share, validate
from perfsearch.parallel.soap.layout import lay_out
from perfsearch.parallel.soap.operator_clock import OperatorClock
from perfsearch.parallel.soap.passes import Passes
from perfsearch.parallel.soap.placement import parameters
from perfsearch.parallel.soap.row_updates import RowUpdates, is_plain_descent, tables_of
from perfsearch.parallel.soap.storage import tile_of
from perfsearch.parallel.soap.timed_passes import TimedPasses
from perfsearch.parallel.soap.traced import dtype_name


class BatchError(ValueError):
    """A batch is not of the shape that the model was captured for."""


class Execution:
    """Trains one rank's share of a plan.

    Args:
        captured: the model.
        plan: fits it and the number of ranks.
        model: in its starting state, on any device; it is copied from, and its buffers are
            updated.
        device: where this rank computes.
        groups: of the default process group, whose ranks are the plan's devices.

    Attributes:
        parameters: what this rank trains, by key: the tile that it stores.
        operators: names, in topological order.
        passes: forward and backward.
        shapes: of all parameters of the model, as the graph views them.
        samples: range of the global batch that this rank must be given, an even share; what it
            needs of other samples it gets from the other ranks.

    Raises:
        PlanError: the plan does not fit.

    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        model: nn.Module,
        device: torch.device,
        groups: Communicators,
    ) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        validate(captured.graph, plan, world)
        self._layout = lay_out(captured, plan, model, self.rank, device, groups)
        self.operators = [operator.name for operator in captured.graph.operators]
        self.samples = share(captured.graph.batch, world, self.rank)
        low, high = self.samples
        inputs = [captured.graph.by_name[name] for name in captured.leaves]
        self._given = [((high - low, *leaf.shape[1:]), leaf.dtype) for leaf in inputs]
        tensors = dict(model.named_parameters())
        viewed = parameters(captured.graph)
        self.shapes = {k: viewed[k].shape if k in viewed else t.shape for k, t in tensors.items()}
        self.parameters = {
            key: nn.Parameter(
                tile_of(tensor.reshape(self.shapes[key]), self.stored(key), device),
                tensor.requires_grad,
            )
            for key, tensor in tensors.items()
            if key in self._layout.tiles
        }
        self.passes = Passes(self._layout, self.parameters, captured.counters, device, groups)

    def require_fit(self, leaves: Sequence[torch.Tensor]) -> None:
        """See that a batch is what the graph was made for.

        Raises:
            BatchError: it is of other shapes, of which only a part would be computed.

        """
        found = [(tuple(leaf.shape), dtype_name(leaf)) for leaf in leaves]
        if found != self._given:
            raise BatchError(
                f"a batch has tensors of {found}, and the model was captured for {self._given}, "
                "as from the first sample: runner=soap needs batches of one shape. Pad them to a "
                "fixed length"
            )

    @contextmanager
    def timed(self, clock: OperatorClock) -> Iterator[None]:
        """Within it steps do one thing at a time, on a clock; they train all the same.

        All ranks must enter it together.
        """
        usual = self.passes
        self.passes = TimedPasses(usual, clock)
        usual.gradients.clear()
        try:
            yield
        finally:
            self.passes = usual

    def stored(self, key: str) -> Rectangle:
        """What this rank has of a parameter."""
        return self._layout.tiles[key].rectangle

    def step(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Forward and backward; returns this rank's share of the loss.

        Args:
            leaves: tensors of the batch, in ``tree_flatten`` order, of the samples in ``samples``.

        """
        self.require_fit(leaves)
        loss = self.passes.forward(leaves)
        self.passes.backward()
        return loss

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Of ``parameters``, after ``step``: summed over those that store the same."""
        return self.passes.gradients

    def update_rows(self, optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Let tables of this rank alone be updated by rows, where that is the same.

        These have no entry in ``gradients`` then.

        Args:
            optimizer: over ``parameters``.

        Returns:
            The tables' keys.

        """
        if optimizer is None or not is_plain_descent(optimizer):
            return []
        tables = tables_of(self._layout.nodes, self._layout.synchroniser.keys)
        self.passes.rows = RowUpdates(tables, optimizer) if tables else None
        return list(tables)

    def apply_gradients(self, optimizer: torch.optim.Optimizer | None) -> None:
        """One step of the optimizer over ``parameters``; none where this rank has none."""
        for key, parameter in self.parameters.items():
            parameter.grad = self.gradients.get(key)
        if optimizer is not None:
            optimizer.step()
        if self.passes.rows is not None:
            self.passes.rows.apply(self.parameters)

    def release(self) -> None:
        """Let go of what the last step left, so that the next one may take its memory."""
        self.passes.reset()
        for parameter in self.parameters.values():
            parameter.grad = None

    def traffic_bytes(self) -> dict[str, int]:
        """What this rank sends to others in one step: values and gradients, and in sums."""
        returning = {e for node in self._layout.nodes for e in node.returning}
        moved = 0
        for exchange in self._layout.exchanges:
            there, back = exchange.sent_elements()
            moved += (there + (back if exchange in returning else 0)) * exchange.dtype.itemsize
        return {"redistributed_mib": moved, "summed_mib": self._layout.synchroniser.summed_bytes}
