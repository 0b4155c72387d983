"""The same from Python: ``perfsearch.search``, ``perfsearch.autotune``, ``perfsearch.apply``."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.command import Command, carried_out
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.knob import Value
from perfsearch.core.settings_file import read_settings

if TYPE_CHECKING:
    import torch

    from perfsearch.core.trial import Trial
    from perfsearch.instrument.script import Script
    from perfsearch.result import SearchResult

_FILE = "config.yaml"


def search(
    *overrides: str,
    quiet: bool = False,
    on_trial: Callable[[Trial], object] | None = None,
    **keys: Any,
) -> SearchResult:
    """Search as the command ``perfsearch`` does, and return what it came to.

    Works in a script, in a notebook, and inside of a Hydra application; it may be called again.
    The directory, the environment, signal handlers and Hydra are afterwards as they were.

        result = perfsearch.search("runner.knobs.bucket_cap_mb=[8,25,64]", budget={"trials": 10})
        result.speed_up, result.changed, result.report
        model = result.apply(model, optimizer)

    Args:
        overrides: ``KEY=VALUE``, as on the command line.
        quiet: print warnings only, to standard error.
        on_trial: called with each trial once it has ended and is on record. What it raises ends
            the search in good order and reaches the caller; the same call goes on from there.
        keys: top-level keys with plain values. ``runner``, ``strategy`` and ``workload`` are the
            name of an option or a mapping with ``name`` and its keys; ``workload`` can also be a
            function of a module, which builds the job, and ``strategy`` one that proposes what to
            try next, as a program of ``strategy=external`` does.

    Raises:
        BadInputError: it cannot be done; the message is the command's, and nothing was started.
        KeyboardInterrupt: it was interrupted; the same call goes on from there.

    """
    from perfsearch.config.compose import compose
    from perfsearch.config.schema import validate
    from perfsearch.pipeline import search as assemble
    from perfsearch.progress import opener
    from perfsearch.result import SearchResult
    from perfsearch.runners import why_no_knobs

    with carried_out(Command("perfsearch.search")):
        settings = validate(compose(overrides, keys, why_no_knobs))
        strategy = keys.get("strategy")
        own = strategy if callable(strategy) else None
        with _interruptible():
            return SearchResult.of(assemble.run_search(settings, opener(quiet, on_trial), own))


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
    from perfsearch.online.knobs import check_knobs

    names = {field.name for field in dataclasses.fields(AutotuneOptions)}
    chosen = AutotuneOptions.from_mapping({k: v for k, v in options.items() if k in names})
    check_knobs(chosen)
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
    knobs = read_knobs(source)
    if model is None:
        prepare(knobs)
        return None
    wrapped: torch.nn.parallel.DistributedDataParallel = _wrap(knobs, model, optimizer)
    return wrapped


def read_knobs(source: str | Path | Mapping[str, Any]) -> dict[str, Value]:
    """The knobs of ``best/config.yaml``, of a run's directory, or of a mapping.

    Raises:
        BadInputError: there are none to be had from it.

    """
    from perfsearch.knobs import by_name, effect_order
    from perfsearch.knobs.base import Use

    knobs = dict(source) if isinstance(source, Mapping) else _from_file(Path(source))
    for name, value in knobs.items():
        names = effect_order(Use.DDP)
        if name not in names:
            raise BadInputError(f"{name}={value}: no such knob. {nearest(str(name), names)}")
        if isinstance(value, list | dict) or value == "search":
            raise BadInputError(f"{name}={value}: it was searched over; give one value.")
        by_name[name].require(value, name)
    return knobs


def _from_file(path: Path) -> dict[str, Any]:
    candidates = [path, path / _FILE, path / "best" / _FILE]
    if (path / "best" / _FILE).is_file():  # a run's own config.yaml is what it was asked for
        candidates = [path / "best" / _FILE]
    file = next((p for p in candidates if p.is_file()), None)
    if file is None:
        raise BadInputError(f"{path}: no such file. Give best/config.yaml of a run.")
    try:
        settings = read_settings(file)
        name = settings["runner"]["name"]
        knobs = dict(settings["runner"]["knobs"]) if name == "ddp" else {}
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"{file}: it is not what a search hands over ({type(error).__name__}: {error}). Give "
            "best/config.yaml of a run."
        ) from error
    if name != "ddp":
        raise BadInputError(
            f"{file}: runner={name} does not wrap by DistributedDataParallel alone. "
            f"{_instead(name, file.parent)}"
        )
    return knobs


def _instead(runner: str, best: Path) -> str:
    """What to do with a result that this cannot put into force."""
    if runner != "soap":
        return f"Its lines for a script are in {best / 'apply'}."
    plan = best / "apply" / "dtensor_plan.py"
    if plan.is_file():
        return f"Its plan for torch's DTensor is {plan}."
    return (
        "Torch has no form for a plan that is not one mesh with regular shards; perfsearch trains "
        f"it: perfsearch --config-path {best}"
    )


def _wrap(knobs: Mapping[str, Value], model: Any, optimizer: Any) -> Any:
    """Wrap ``model``, or give its wrapper other settings."""
    from torch.nn.parallel import DistributedDataParallel

    from perfsearch.knobs import model as of_model
    from perfsearch.knobs import optimizer as optimizer_knobs
    from perfsearch.knobs import process
    from perfsearch.online import ddp as wrapping
    from perfsearch.online.optimizer import ImplementationSwitch, why_not_switchable

    elsewhere = _elsewhere(knobs)
    process.apply(knobs)
    if not isinstance(model, DistributedDataParallel):
        model, _, lost = of_model.apply(knobs, model)
        elsewhere += [lost] if lost else []
        model = DistributedDataParallel(model)
    elif of_model.CHANNELS_LAST.of(knobs) or of_model.is_compiled(knobs):
        names = " and ".join((of_model.CHANNELS_LAST.name, of_model.COMPILE.name))
        elsewhere.append(f"{names}: give the module before it is wrapped")
    wrapping.make_tunable(model)
    wrapping.rewrap(model, {k: v for k, v in knobs.items() if v is not None})
    choice, name = optimizer_knobs.IMPLEMENTATION.of(knobs), optimizer_knobs.IMPLEMENTATION.name
    if optimizer is not None and choice not in (None, optimizer_knobs.DEFAULT):
        reason = why_not_switchable(optimizer)
        if reason:
            elsewhere.append(f"{name}={choice}: {reason}")
        else:
            ImplementationSwitch(optimizer).apply(choice)
    elif choice not in (None, optimizer_knobs.DEFAULT):
        elsewhere.append(f"{name}={choice}: no optimizer was given")
    for text in elsewhere:
        warnings.warn(f"perfsearch.apply: not in force by itself: {text}", stacklevel=3)
    return model


def prepare(knobs: Mapping[str, Value]) -> Script:
    """Have everything that is built from now on take the knobs; the result says what did."""
    from perfsearch.instrument.patching import once
    from perfsearch.instrument.script import Script
    from perfsearch.knobs.transport import plan

    planned = plan(knobs, [])
    script = Script(planned.objects)
    script.losses.keeping = False
    script.switches.put_into_force()
    script.collection.put(planned.objects)
    script.optimizers.before_step = once(script.sharding.put_into_force)
    script.optimizers.after_step = script.end_step
    variables = {n: v for n, v in planned.environment.items() if os.environ.get(n) != v}
    elsewhere = [f"start the script with {_assigned(variables)}"] if variables else []
    elsewhere += [f"{name}={value}" for name, value in planned.unreachable.items()]
    for text in elsewhere:
        warnings.warn(f"perfsearch.apply: not in force by itself: {text}", stacklevel=3)
    return script


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _elsewhere(knobs: Mapping[str, Value]) -> list[str]:
    """What a wrapper cannot bring about."""
    from perfsearch.knobs import collection, loader, nccl
    from perfsearch.knobs import model as of_model

    variables = nccl.environment(knobs)
    wanted = {n: v for n, v in variables.items() if os.environ.get(n) != v}
    found = []
    if wanted:
        found.append(f"start the script with {_assigned(wanted)}")
    given = loader.arguments(knobs)
    if given:
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        found.append(f"DataLoader(..., {text})")
    found += ["; ".join(collection.code_lines(knobs))] if collection.code_lines(knobs) else []
    if of_model.CHANNELS_LAST.of(knobs):
        found.append("give each batch of images memory_format=torch.channels_last")
    return found
