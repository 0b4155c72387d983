"""Knobs from a file that a search has written, and how each of them reaches a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Value
from perfsearch.instrument.mapping import Mapped, read_file
from perfsearch.instrument.switch_names import OF_OBJECTS, SWITCHES
from perfsearch.parallel import nccl

_OFF = (None, False, 0, "none", "default", "policy")


@dataclass
class KnobPlan:
    """How knobs reach a script.

    Attributes:
        objects: through the constructors that the script calls, and torch's switches.
        environment: variables to set before its processes start.
        mapped: through the script's own arguments and files.
        unreachable: knobs that nothing here can set, with their values.

    """

    objects: dict[str, Value] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, Value] = field(default_factory=dict)
    unreachable: dict[str, Value] = field(default_factory=dict)


def plan(knobs: Mapping[str, Value], maps: Sequence[Mapped]) -> KnobPlan:
    """Sort knobs by how they reach a script; those that are ``None`` are left out."""
    names = {mapped.name for mapped in maps}
    made = KnobPlan()
    for name, value in knobs.items():
        if value is None:
            continue
        if name in names:
            made.mapped[name] = value
        elif name in nccl.VARIABLES:
            made.environment.update(nccl.environment({name: value}, nccl.VARIABLES))
        elif name in OF_OBJECTS or name in SWITCHES:
            made.objects[name] = value
            if name == "omp_num_threads":
                made.environment["OMP_NUM_THREADS"] = str(value)
        elif not any(value is off or value == off for off in _OFF):
            made.unreachable[name] = value
    return made


@dataclass(frozen=True)
class KnobFile:
    """What a search has written, as far as a script is started with it.

    Attributes:
        knobs: values by name.
        workload: the ``workload`` group, empty where there is none.
        runner: which one has found them; empty where it is not said.
        batch: ``fixed`` or ``free``, as it was searched.
        ds_config: the DeepSpeed configuration that was given beside the command, if any.

    """

    knobs: dict[str, Value] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    runner: str = ""
    batch: Literal["fixed", "free"] = "fixed"
    ds_config: str | None = None


def read_knobs(file: str) -> KnobFile:
    """Knobs of ``best/config.yaml``, or of a plain file of names and values.

    Raises:
        BadInputError: there is no such file, or a knob in it has no single value.

    """
    option = f"--knobs {file}"
    if Path(file).is_dir():
        raise BadInputError(f"{option}: this is a directory. Give the file: {file}/config.yaml")
    content = read_file(file if file.endswith(".json") else _yaml(file, option), option)
    runner = content.get("runner")
    if isinstance(runner, Mapping) and runner.get("name") == "soap":
        apply = Path(file).parent / "apply"
        raise BadInputError(
            f"{option}: runner=soap splits and places single operators, which no script takes as a "
            f"knob. Its plan is in {apply}: strategy.yaml, and dtensor_plan.py for a script, where "
            "it is one mesh"
        )
    knobs = content if not isinstance(runner, Mapping) else runner.get("knobs") or {}
    for name, value in knobs.items():
        if isinstance(value, list | Mapping) or value == "search":
            raise BadInputError(
                f"{option}: {name}={value} is what a search was to try, no single value. Give the "
                "best/config.yaml that a search has written"
            )
    workload = content.get("workload")
    of_runner = runner if isinstance(runner, Mapping) else {}
    return KnobFile(
        knobs=dict(knobs),
        workload=dict(workload) if isinstance(workload, Mapping) else {},
        runner=str(of_runner.get("name", "")),
        batch="free" if content.get("batch") == "free" else "fixed",
        ds_config=of_runner.get("ds_config"),
    )


def _yaml(file: str, option: str) -> str:
    if not file.endswith((".yaml", ".yml")):
        raise BadInputError(f"{option}: a .yaml or .json file is needed")
    return file
