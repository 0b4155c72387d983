"""The same from Python: ``perfsearch.search``, ``perfsearch.autotune``, ``perfsearch.apply``."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.errors import BadInputError

if TYPE_CHECKING:
    import torch

    from perfsearch.pipeline.session import Result


def search(*overrides: str, **keys: Any) -> Result:
    """Search as the command ``perfsearch`` does, and return what it came to.

    Works in a script, in a notebook, and inside of a Hydra application; it may be called again.
    The directory, the environment, signal handlers and Hydra are afterwards as they were.

        result = perfsearch.search("runner.knobs.bucket_cap_mb=[8,25,64]", budget={"trials": 10})
        result.best, result.verdict.reason, result.run_dir

    Args:
        overrides: ``KEY=VALUE``, as on the command line.
        keys: top-level keys with plain values. ``runner``, ``strategy`` and ``workload`` are the
            name of an option or a mapping with ``name`` and its keys; ``workload`` can also be a
            function of a module, which builds the job.

    Raises:
        BadInputError: it cannot be done; the message is the command's, and nothing was started.
        KeyboardInterrupt: it was interrupted; the same call goes on from there.

    """
    from perfsearch.compose import compose
    from perfsearch.config import validate
    from perfsearch.pipeline import search as assemble
    from perfsearch.runners import why_no_knobs
    from perfsearch.view import open_view

    settings = validate(compose(overrides, keys, why_no_knobs))
    with _interruptible():
        return assemble.run_search(settings, open_view)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End a search in good order on a signal, then let the caller's own handler have it."""
    from perfsearch.core.signals import ExitCode, Interrupted, interruptible

    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only; an exception there ends nothing here
        return
    try:
        with interruptible():
            yield
    except Interrupted as interrupted:
        if interrupted.exit_code == ExitCode.SIGINT:
            raise KeyboardInterrupt from interrupted
        signal.raise_signal(interrupted.exit_code - 128)
        raise SystemExit(int(interrupted.exit_code)) from interrupted


def autotune(model: torch.nn.Module, **options: Any) -> torch.nn.parallel.DistributedDataParallel:
    """Tune a model while it trains, in place of ``DistributedDataParallel``.

        model = perfsearch.autotune(model, log_file="tuning.csv")

    Between two of the optimizer's steps all ranks take other settings at once, until the budget is
    spent or nothing promises a gain; the best ones stay. Called on every rank alike.

    Args:
        model: a module, which is wrapped, or a wrapper as its constructor left it.
        options: fields of ``perfsearch.online.AutotuneOptions``; everything else goes to the
            wrapper's constructor, and is where tuning starts from.

    Returns:
        The wrapper, a ``DistributedDataParallel`` like any other.

    Raises:
        BadInputError: no process group, an unknown option, or a log that cannot be read.

    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from perfsearch.online import AutotuneOptions, rank
    from perfsearch.online import knobs as beforehand

    names = {field.name for field in dataclasses.fields(AutotuneOptions)}
    chosen = AutotuneOptions.from_mapping({k: v for k, v in options.items() if k in names})
    beforehand.check_knobs(chosen)
    for_wrapper = {k: v for k, v in options.items() if k not in names}
    if not dist.is_initialized():
        raise BadInputError(
            "perfsearch.autotune: there is no process group. Start the script with torchrun and "
            "call torch.distributed.init_process_group() first."
        )
    if isinstance(model, DistributedDataParallel):
        if for_wrapper:
            raise BadInputError(
                f"perfsearch.autotune: {', '.join(for_wrapper)}: the model is wrapped already. "
                f"Options are {', '.join(sorted(names))}."
            )
        return rank.begin_tuning(model, chosen)
    with rank.tuning_paused():
        wrapper = DistributedDataParallel(model, **for_wrapper)
    return rank.begin_tuning(wrapper, chosen)


def apply(
    source: str | Path | Mapping[str, Any],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.nn.parallel.DistributedDataParallel | None:
    """Wrap a model as a search of ``runner=ddp`` found best.

        model = perfsearch.apply("outputs/RUN/best/config.yaml", model, optimizer)

    Without a model, at the beginning of a script: wrappers, loaders and optimizers that it builds
    from then on take the knobs, as under ``perfsearch-run --knobs``. What only takes effect
    elsewhere (environment variables before the start, the loader's arguments) is named in a
    warning.

    Args:
        source: ``best/config.yaml`` or the run's directory, or knobs by name.
        model: a module, which is wrapped, or a ``DistributedDataParallel`` between two steps;
            ``None``: whatever the script builds.
        optimizer: of the model; it takes the implementation that was found.

    Raises:
        BadInputError: no such file, a knob that a wrapper does not know, or another runner's.

    """
    from perfsearch import api_apply

    knobs = api_apply.read_knobs(source)
    if model is None:
        api_apply.prepare(knobs)
        return None
    wrapped: torch.nn.parallel.DistributedDataParallel = api_apply.apply(knobs, model, optimizer)
    return wrapped
