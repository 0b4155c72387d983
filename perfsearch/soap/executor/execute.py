"""A plan, really run: each rank computes its parts, and gets what it lacks from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsearch.soap.capture.capture import Captured
from perfsearch.soap.capture.lower import dtype_name
from perfsearch.soap.executor.exchange import Communicators
from perfsearch.soap.executor.passes import (
    Column,
    OperatorClock,
    Passes,
    RowUpdates,
    TimedPasses,
    is_plain_descent,
    tables_of,
)
from perfsearch.soap.executor.rank_plan import plan_rank, tile_of
from perfsearch.soap.graph import Rectangle, share
from perfsearch.soap.plan import (
    OperatorTime,
    Plan,
    PlanError,
    parameters,
    validate_plan,
)
from perfsearch.soap.rules.base import sizes
from perfsearch.workloads.base import OptimizerFactory


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
        samples: range of the global batch that this rank must load, an even share; what it
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
        validate_plan(captured.graph, plan, world)
        self._rank_plan = plan_rank(captured, plan, model, self.rank, device, groups)
        self.operators = [operator.name for operator in captured.graph.operators]
        self.samples = share(captured.graph.batch, world, self.rank)
        low, high = self.samples
        inputs = [captured.graph.by_name[name] for name in captured.leaves]
        self._expected = [((high - low, *leaf.shape[1:]), leaf.dtype) for leaf in inputs]
        tensors = dict(model.named_parameters())
        viewed = parameters(captured.graph)
        self.shapes = {k: viewed[k].shape if k in viewed else t.shape for k, t in tensors.items()}
        self.parameters = {
            key: nn.Parameter(
                tile_of(tensor.reshape(self.shapes[key]), self.stored(key), device),
                tensor.requires_grad,
            )
            for key, tensor in tensors.items()
            if key in self._rank_plan.tiles
        }
        self.passes = Passes(self._rank_plan, self.parameters, captured.counters, device, groups)

    def require_fit(self, leaves: Sequence[torch.Tensor]) -> None:
        """See that a batch is what the graph was made for.

        Raises:
            BatchError: it is of other shapes, of which only a part would be computed.

        """
        found = [(tuple(leaf.shape), dtype_name(leaf)) for leaf in leaves]
        if found != self._expected:
            raise BatchError(
                f"a batch has tensors of {found}, and the model was captured for {self._expected}, "
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
        return self._rank_plan.tiles[key].rectangle

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
        tables = tables_of(self._rank_plan.nodes, self._rank_plan.synchroniser.keys)
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
        returning = {e for node in self._rank_plan.nodes for e in node.returning}
        moved = 0
        for exchange in self._rank_plan.exchanges:
            there, back = exchange.sent_elements()
            moved += (there + (back if exchange in returning else 0)) * exchange.dtype.itemsize
        return {"redistributed_mib": moved, "summed_mib": self._rank_plan.synchroniser.summed_bytes}


# -----------------------------------------------------------------------------
# A step as CUDA graphs: its hundreds of launches become three.
Phase = Callable[[], None]


class Recording:
    """The phases of a step, recorded after some have run, and replayed from then on.

    Recording runs nothing. Where a rank cannot record, none does, since replayed and launched
    communication would not meet.

    Args:
        phases: functions that take and leave their tensors where the others find them.
        inputs: tensors of a batch, which replays read from where they were when recorded.
        device: a GPU.

    Attributes:
        reason: why there are no graphs; empty where there are.

    """

    def __init__(
        self, phases: Sequence[Phase], inputs: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        self._phases = list(phases)
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.reason = ""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Where replays read the batch."""
        return self._inputs

    def record(self) -> bool:
        """Record every phase; return whether all ranks could."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # graphs cannot take what was kept for launched steps
        pool = torch.cuda.graph_pool_handle()
        try:
            for phase in self._phases:
                graph = torch.cuda.CUDAGraph()
                # other threads, such as NCCL's watchdog, may query events meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    phase()
                self._graphs.append(graph)
        except RuntimeError as error:
            self.reason = str(error).strip().splitlines()[0]
        torch.cuda.synchronize(self._device)
        able = torch.tensor([0.0 if self.reason else 1.0], device=self._device)
        dist.all_reduce(able, dist.ReduceOp.MIN)
        if not able.item():
            self.close()
            self.reason = self.reason or "another rank could not record its step"
        return not self.reason

    def give(self, batch: Sequence[torch.Tensor]) -> None:
        """Put a batch where replays read it."""
        for place, tensor in zip(self._inputs, batch, strict=True):
            place.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Let go of the graphs now: a communicator waits at its end for those that use it.

        The phases know their recording, so that only the garbage collector would find them.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._phases.clear()
        self._inputs.clear()

    def replay(self, phase: int) -> None:
        """Launch a phase."""
        self._graphs[phase].replay()


# -----------------------------------------------------------------------------
# The user's optimizer on pieces of tensors: only where that is the same as on the whole.
_BY_ELEMENT = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Optimizers of torch that update each element by its own gradients alone."""


def shard_optimizer(
    factory: OptimizerFactory,
    parameters: Mapping[str, nn.Parameter],
    whole: Mapping[str, Rectangle],
    stored: Mapping[str, Rectangle],
    model: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer | None:
    """Make the user's optimizer for what a rank stores; ``None`` where it stores nothing.

    Where that is not the model as it stands, the factory is given the model's own parameters, so
    that it sees their number, order and shapes, by which it may group them; then each is replaced
    by its tile.

    Args:
        factory: the user's.
        parameters: tiles, by key.
        whole: of each of the model's parameters, as the graph views it.
        stored: what this rank has of them.
        model: the model's parameters, by key.

    Raises:
        PlanError: it looks at whole tensors, or at all of them, and the rank has less.

    """
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return None
    partial = [key for key in whole if stored.get(key) != whole[key]]
    viewed = [key for key in whole if sizes(whole[key]) != model[key].shape]
    if not partial and not viewed:
        return factory([parameters[key] for key in model])
    optimizer = factory(list(model.values()))
    kind, odd = type(optimizer), [*partial, *viewed][0]
    if not (kind.__module__.startswith("torch.optim") and kind.__name__ in _BY_ELEMENT):
        raise PlanError(
            f"the optimizer {kind.__name__} may look at whole tensors, and this plan gives a "
            f"device {'less than all' if partial else 'a view'} of {odd}. Plans that split or "
            f"place parameters need one of torch.optim's {', '.join(sorted(_BY_ELEMENT))}"
        )
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or "step" in vars(optimizer)
    ):
        raise PlanError(
            f"the optimizer {kind.__name__} has hooks on its step, which may look at all "
            f"parameters, and this plan gives a device {'less than all' if partial else 'a view'} "
            f"of {odd}. Plans that split or place parameters need one without"
        )
    _put_tiles(optimizer, {id(model[key]): key for key in model}, parameters, whole, stored)
    return optimizer


def _put_tiles(
    optimizer: torch.optim.Optimizer,
    keys: Mapping[int, str],
    parameters: Mapping[str, nn.Parameter],
    whole: Mapping[str, Rectangle],
    stored: Mapping[str, Rectangle],
) -> None:
    """Replace the model's parameters in a new optimizer, and their state if it has one already."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if any(id(tensor) not in keys for tensor in group["params"]):
            raise PlanError("the optimizer has a parameter that is none of the model's")
        held = [(keys[id(tensor)], tensor) for tensor in group["params"]]
        group["params"] = [parameters[key] for key, _ in held if key in parameters]
        for key, tensor in held:
            if key not in parameters or tensor not in state:
                continue
            tile, shape = parameters[key], sizes(whole[key])
            part = tuple(slice(*span) for span in stored[key])
            optimizer.state[tile] = {
                name: value.reshape(shape)[part].to(tile.device, copy=True)
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape and shape
                else value
                for name, value in state[tensor].items()
            }
    optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["params"]]


def make_capturable(optimizer: torch.optim.Optimizer | None) -> bool:
    """Let a new optimizer step within a CUDA graph; return whether it can."""
    if optimizer is None or type(optimizer).__name__ == "SGD":
        return True
    if not all("capturable" in group for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["capturable"] = True
    return True


# -----------------------------------------------------------------------------
# Some further steps of an execution, to time each operator in them.
STEPS = 4
"""Steps that are run; the first is not counted: what was replayed so far is launched there."""


def time_operators(
    execution: Execution,
    optimizer: torch.optim.Optimizer | None,
    next_leaves: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
) -> tuple[dict[str, OperatorTime], list[Span]]:
    """What each operator takes: the slowest rank's in each step, and the median of the steps; and
    the spans of the last step on all ranks.

    All ranks must call it together. The steps train as any others do.

    Args:
        execution: of a plan, warm.
        optimizer: over its parameters; ``None`` where this rank has none.
        next_leaves: gives tensors of the next batch, as ``Execution.step`` takes them.
        device: where this rank computes.

    """
    clock = OperatorClock(len(execution.operators), device)
    readings = []
    with execution.timed(clock):
        for _ in range(STEPS):
            execution.step(next_leaves())
            execution.apply_gradients(optimizer)
            slowest = clock.read().to(device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            readings.append(slowest.cpu())
    usual = torch.stack(readings[1:]).median(0).values
    times = {
        name: OperatorTime(*(round(float(usual[place, column]), 6) for column in Column))
        for place, name in enumerate(execution.operators)
    }
    return times, _spans_of_all(clock)


Span = tuple[int, int, int, float, float]
"""Device, place of an operator, ``Column``, begin and end in microseconds from the first begin.

Ranks come to one point before each operator, so that their first spans begin together.
"""


def _spans_of_all(clock: OperatorClock) -> list[Span]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(o, int(c), a, b) for o, c, a, b in clock.last])
    return [
        (device, place, column, round(begin_us, 1), round(end_us, 1))
        for device, spans in enumerate(gathered)
        for place, column, begin_us, end_us in spans
    ]
