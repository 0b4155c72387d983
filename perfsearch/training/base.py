"""The contract between the loop that measures and a recipe that builds a training step."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from perfsearch.core.knob import Value
from perfsearch.knobs import loader, model
from perfsearch.training.process_groups import Groups
from perfsearch.workloads.base import Job

Mark = Callable[[str], None]
"""Called at the end of each phase of a step; repeated phases of one step add up."""

NextBatch = Callable[[], Any]
"""Gives the next micro-batch, on the device; marks its own phases."""


@dataclass(frozen=True)
class LoaderOptions:
    """How a rank loads its share of the data.

    Attributes:
        micro_batch: samples a rank takes at once; the share of a step is a multiple of it.
        arguments: of the ``DataLoader`` that knobs stand for.
        channels_last: whether image batches are laid out with channels innermost.

    """

    micro_batch: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    channels_last: bool = False

    @classmethod
    def of(cls, configuration: Mapping[str, Value], micro_batch: int) -> LoaderOptions:
        """Read them from a configuration."""
        return cls(
            micro_batch,
            loader.arguments(configuration),
            bool(model.CHANNELS_LAST.of(configuration)),
        )

    @property
    def workers(self) -> int:
        """Loader processes; 0 loads in the training process."""
        return int(self.arguments.get(loader.WORKERS.parameter, 0))

    @property
    def pin_memory(self) -> bool:
        """Whether batches are copied to page-locked memory."""
        return bool(self.arguments.get(loader.PIN_MEMORY.parameter))


@dataclass(frozen=True)
class BuildContext:
    """What a recipe builds from.

    Attributes:
        configuration: every knob, pinned ones included; ``None`` is the library's own default.
        groups: the present process groups.
        local_batch: samples that one rank trains in one step.
        job: gives model, data, loss and optimizer in the state that every trial starts from;
            with ``reuse=False`` the model is a new object that the recipe may take apart.
        options: further plain values from the runner.
        host_job: gives the same with a new model that is still on the host; its values may be
            shared and must not be written before they are moved.

    """

    configuration: Mapping[str, Value]
    groups: Groups
    local_batch: int
    job: Callable[[bool], Job]
    options: Mapping[str, Any]
    host_job: Callable[[], Job]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.groups.device


class TrainStep(ABC):
    """One configuration, built and ready to train.

    Attributes:
        job: what it trains.
        loader: how its data is loaded.
        compiles: whether its first steps compile, which is accounted for apart.
        lost: why something that was asked for is not in force; empty where all is.
        marks_communication: whether ``run`` marks ``comm_exposed`` after ``backward``: how long the
            step waits for communication when everything is computed.

    """

    job: Job
    loader: LoaderOptions
    compiles: bool = False
    lost: str = ""
    marks_communication: bool = False

    @abstractmethod
    def run(self, next_batch: NextBatch, mark: Mark) -> torch.Tensor:
        """Train one global batch.

        Marks ``forward``, ``backward`` and ``optimizer``, in that order, without waiting for the
        device.

        Returns:
            This rank's mean loss, detached.

        """

    @abstractmethod
    def in_force(self) -> dict[str, Value]:
        """What the libraries say is in effect, by knob name where it can be read back."""

    def evidence(self) -> dict[str, float]:
        """Numbers for the diagnosis, in the unit that the name ends with."""
        return {}

    def alone(self) -> AbstractContextManager[Any] | None:
        """Within it ``run`` exchanges no gradients; ``None`` where it cannot do without.

        What the step then takes less is the most that better communication can give. The ranks'
        weights part, so it comes last in a trial.
        """
        return None

    def survive(self) -> None:  # noqa: B027 - a recipe may have nothing to try
        """Do what a real run does now and then and needs more memory for; an error ends the trial.

        Called on every rank after the scored steps, where ``recipe_options`` has ``survive``.
        """

    def examine(self, next_batch: NextBatch) -> dict[str, Any]:
        """Run further steps to tell what a step is made of: plain values, the same on all ranks.

        They are kept with the measurement's ``environment``. Called on every rank when all else of
        a trial is done, where ``recipe_options`` has ``examine``; an error does not cost the score.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - a recipe may have nothing to undo
        """Give back what was built; torch's global switches are restored by the loop."""


class Recipe(Protocol):
    """A module that ranks can build from."""

    def build(self, context: BuildContext) -> TrainStep:
        """Put the configuration into force."""
        ...


def load(name: str) -> Recipe:
    """Import the recipe ``name``, a module below ``perfsearch``, such as ``training.ddp``.

    Raises:
        ValueError: the name is not that of a module.

    """
    module = f"perfsearch.{name}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"recipe {name!r} is not a module name")
    try:
        recipe: Recipe = importlib.import_module(module)  # type: ignore[assignment]
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):  # a package that the recipe needs
            raise
        raise ValueError(f"recipe {name!r} is not a module name: there is no {module}") from error
    return recipe


# -----------------------------------------------------------------------------
# The backward pass, its own work told from the communication that nothing overlaps.


def run_backward(loss: torch.Tensor, mark: Mark, split: bool) -> None:
    """Run it, and mark ``backward``; with ``split`` its end of computing, then ``comm_exposed``.

    DistributedDataParallel waits for its all-reduces in a callback at the end of the backward pass,
    which it registers with the last gradient. One that is registered with the first gradient runs
    before it, when everything is computed (on a GPU: queued on the stream that then waits).
    """
    if not split:
        loss.backward()
        mark("backward")
        return

    def at_first_gradient(gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: mark("backward"))

    loss.register_hook(at_first_gradient)
    loss.backward()
    mark("comm_exposed")
