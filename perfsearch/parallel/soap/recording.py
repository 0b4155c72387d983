"""A step as CUDA graphs: its hundreds of launches become three."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

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
