"""A found configuration put into force on a model in this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.knob import Value
from perfsearch.parallel import nccl
from perfsearch.runners._ddp_knobs import EFFECT_ORDER
from perfsearch.runners.ddp import export

_FILE = "config.yaml"


def read_knobs(source: str | Path | Mapping[str, Any]) -> dict[str, Value]:
    """The knobs of ``best/config.yaml``, of a run's directory, or of a mapping.

    Raises:
        BadInputError: there are none to be had from it.

    """
    knobs = dict(source) if isinstance(source, Mapping) else _from_file(Path(source))
    for name, value in knobs.items():
        if name not in EFFECT_ORDER:
            raise BadInputError(f"{name}={value}: no such knob. {nearest(name, EFFECT_ORDER)}")
        if isinstance(value, list | dict) or value == "search":
            raise BadInputError(f"{name}={value}: it was searched over; give one value.")
    return knobs


def _from_file(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    candidates = [path, path / _FILE, path / "best" / _FILE]
    if (path / "best" / _FILE).is_file():  # a run's own config.yaml is what it was asked for
        candidates = [path / "best" / _FILE]
    file = next((p for p in candidates if p.is_file()), None)
    if file is None:
        raise BadInputError(f"{path}: no such file. Give best/config.yaml of a run.")
    try:
        settings = yaml.safe_load(file.read_text())
        name, knobs = settings["runner"]["name"], settings["runner"]["knobs"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"{file}: it is not what a search hands over ({type(error).__name__}: {error}). Give "
            "best/config.yaml of a run."
        ) from error
    if name != "ddp":
        raise BadInputError(
            f"{file}: runner={name} does not wrap by DistributedDataParallel alone. "
            f"{_instead(name, file.parent)}"
        )
    return dict(knobs)


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


def apply(knobs: Mapping[str, Value], model: Any, optimizer: Any) -> Any:
    """Wrap ``model``, or give its wrapper other settings; see ``perfsearch.apply``."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from perfsearch.online import ddp as wrapping
    from perfsearch.online.ddp import ImplementationSwitch, why_not_switchable

    elsewhere = _elsewhere(knobs)
    if knobs.get("omp_num_threads") is not None:
        torch.set_num_threads(int(knobs["omp_num_threads"] or 1))
    if knobs.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = bool(knobs["cudnn_benchmark"])
    if not isinstance(model, DistributedDataParallel):
        model = DistributedDataParallel(_module(knobs, model))
    elif knobs.get("channels_last") or knobs.get("compile_mode") not in (None, "none"):
        elsewhere.append("channels_last and compile_mode: give the module before it is wrapped")
    wrapping.adopt(model)
    wrapping.rewrap(model, {k: v for k, v in knobs.items() if v is not None})
    choice = knobs.get("optimizer_implementation")
    if optimizer is not None and choice not in (None, "default"):
        reason = why_not_switchable(optimizer)
        if reason:
            elsewhere.append(f"optimizer_implementation={choice}: {reason}")
        else:
            ImplementationSwitch(optimizer).apply(choice)
    elif choice not in (None, "default"):
        elsewhere.append(f"optimizer_implementation={choice}: no optimizer was given")
    for text in elsewhere:
        warnings.warn(f"perfsearch.apply: not in force by itself: {text}", stacklevel=3)
    return model


def prepare(knobs: Mapping[str, Value]) -> None:
    """Have everything that is built from now on take the knobs; see ``perfsearch.apply``."""
    from perfsearch.instrument.patching import once
    from perfsearch.instrument.script import Script
    from perfsearch.run_knobs import plan

    planned = plan(knobs, [])
    script = Script(planned.objects)
    script.losses.keeping = False
    script.switches.put_into_force()
    script.optimizers.before_step = once(script.sharding.put_into_force)
    variables = {n: v for n, v in planned.environment.items() if os.environ.get(n) != v}
    elsewhere = [f"start the script with {_assigned(variables)}"] if variables else []
    elsewhere += [f"{name}={value}" for name, value in planned.unreachable.items()]
    for text in elsewhere:
        warnings.warn(f"perfsearch.apply: not in force by itself: {text}", stacklevel=3)


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _module(knobs: Mapping[str, Value], module: Any) -> Any:
    import torch

    if knobs.get("channels_last"):
        module = module.to(memory_format=torch.channels_last)
    mode = knobs.get("compile_mode")
    if mode not in (None, "none"):
        module = torch.compile(module, mode=None if mode == "default" else str(mode))
    return module


def _elsewhere(knobs: Mapping[str, Value]) -> list[str]:
    """What a wrapper cannot bring about."""
    variables = nccl.environment(knobs, nccl.VARIABLES)
    wanted = {n: v for n, v in variables.items() if os.environ.get(n) != v}
    found = []
    if wanted:
        found.append(f"start the script with {_assigned(wanted)}")
    loader = export.loader_lines(knobs)
    if loader:
        text = ", ".join(f"{name}={value!r}" for name, value in loader.items())
        found.append(f"DataLoader(..., {text})")
    if knobs.get("channels_last"):
        found.append("give each batch of images memory_format=torch.channels_last")
    return found
