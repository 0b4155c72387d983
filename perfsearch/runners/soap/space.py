"""The search space: a knob an operator, whose values are written like ``4x1@0,1``.

Before the ``@`` stand the number of parts along each dimension of the output, behind it the devices
of the parts in row-major order. A scalar's has nothing before it. ``4x1/4@0,1,2,3`` says that the
four parts share the sums that their elements are: each adds up a quarter for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from perfsearch.config.options import show
from perfsearch.core.errors import nearest
from perfsearch.core.knob import Configuration, Kind, Knob, Numerics, Value
from perfsearch.core.narrow import SEARCH, KnobError, narrow
from perfsearch.soap.graph import Graph
from perfsearch.soap.plan import OperatorConfiguration, Plan, validate_plan

if TYPE_CHECKING:
    from perfsearch.soap.simulator.problem import Problem

_FORM = re.compile(r"^(\d+(x\d+)*(/\d+)?)?@\d+(,\d+)*$", re.ASCII)


def plan_to_knob(configuration: OperatorConfiguration) -> str:
    """A knob's value."""
    degrees = "x".join(map(str, configuration.degrees))
    if configuration.sums > 1:
        degrees += f"/{configuration.sums}"
    return f"{degrees}@{','.join(map(str, configuration.devices))}"


def plan_of_knob(value: Value) -> OperatorConfiguration:
    """What ``plan_to_knob`` wrote.

    Raises:
        ValueError: it is of another form.

    """
    if not isinstance(value, str) or not _FORM.match(value):
        raise ValueError(
            "its form is PARTS@DEVICES: parts along each dimension of the output, as in 2x1, then "
            "a device for each part, as in 0,1"
        )
    parts, _, devices = value.partition("@")
    degrees, _, sums = parts.partition("/")
    return OperatorConfiguration(
        tuple(int(d) for d in degrees.split("x")) if degrees else (),
        tuple(int(d) for d in devices.split(",")),
        int(sums or 1),
    )


def configuration_of(plan: Plan) -> dict[str, Value]:
    """The whole configuration of a plan."""
    return {name: plan_to_knob(chosen) for name, chosen in plan.items()}


def plan_of(configuration: Configuration) -> Plan:
    """The plan of a whole configuration."""
    return {name: plan_of_knob(value) for name, value in configuration.items()}


def by_operator(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``runner.knobs`` with whole names: those with dots come as groups from a command line."""
    found: dict[str, Any] = {}
    for name, setting in settings.items():
        inside = by_operator(setting) if setting and isinstance(setting, Mapping) else {"": setting}
        found.update({f"{name}.{rest}" if rest else str(name): v for rest, v in inside.items()})
    return found


def allowed_configurations(
    graph: Graph, start: Plan, settings: Mapping[str, Any], devices: int
) -> dict[str, tuple[OperatorConfiguration, ...]]:
    """What operators with an entry in ``runner.knobs`` may have.

    Raises:
        KnobError: an entry is for no operator, or a value is not one that its operator can have.

    """
    found = {}
    for name, setting in settings.items():
        if name not in start:
            raise KnobError(f"runner.knobs.{name}: no such operator. {nearest(name, start)}")
        if setting == SEARCH:
            continue
        values = setting if isinstance(setting, list | tuple) else [setting]
        chosen = []
        for value in values:
            try:
                chosen.append(plan_of_knob(value))
                validate_plan(graph, {**start, name: chosen[-1]}, devices)
            except ValueError as error:
                raise KnobError(
                    f"runner.knobs.{name}={show(value)}: a value such as "
                    f"{plan_to_knob(start[name])} is needed ({error})"
                ) from error
        if isinstance(setting, list | tuple) and start[name] not in chosen:
            chosen.append(start[name])  # the baseline's, which a search begins with
        found[name] = tuple(chosen)
    return found


def knobs(
    problem: Problem, baseline: Plan, settings: Mapping[str, Any]
) -> tuple[list[Knob], dict[str, Value]]:
    """Split operators into those searched and those pinned.

    Args:
        problem: the choices.
        baseline: the defaults.
        settings: ``runner.knobs``: what an operator may have, all that there is without an entry.

    Raises:
        KnobError: an operator that there is not, or a value that it cannot have.

    """
    declared = []
    for place, operator in enumerate(problem.operators):
        values = tuple(plan_to_knob(c) for c in problem.configurations(place))
        declared.append(
            Knob(
                operator.name,
                Kind.CATEGORICAL,
                plan_to_knob(baseline[operator.name]),
                values,
                numerics=Numerics.REORDERED,
                help=f"parts and devices of {operator.kind} {list(operator.shape)}",
            )
        )
    asked = {knob.name: SEARCH if len(knob.values) > 1 else knob.default for knob in declared}
    return narrow(declared, {**asked, **settings}, Numerics.REORDERED)


def neighbours(graph: Graph, searched: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each searched operator those that it feeds or is fed by, in the graph's order."""
    found: dict[str, list[str]] = {name: [] for name in searched}
    for source, target, _ in graph.edges:
        if source in found and target in found:
            found[source].append(target)
            found[target].append(source)
    return {name: tuple(dict.fromkeys(beside)) for name, beside in found.items()}
