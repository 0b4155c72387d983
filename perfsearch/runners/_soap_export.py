"""Files of a strategy that was found, and how well the simulator foretold what was executed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfsearch.parallel.soap import dtensor_export, strategy_file
from perfsearch.parallel.soap.configuration import Plan
from perfsearch.runners import _soap_operators, _soap_report

if TYPE_CHECKING:
    from perfsearch.parallel.soap.simulator import Simulator


def write_strategy(
    simulator: Simulator, plan: Plan, devices: int, export_to: str | None, directory: Path
) -> list[Path]:
    """The strategy as YAML, its timeline and, where it is regular, a DTensor plan.

    Args:
        simulator: of the job.
        plan: to write.
        devices: of the machine.
        export_to: another place that the user wants the YAML in.
        directory: made where it is missing.

    """
    directory.mkdir(parents=True, exist_ok=True)
    graph = simulator.problem.graph
    text = strategy_file.dump(graph, plan, devices)
    written = [directory / "strategy.yaml", *([] if export_to is None else [Path(export_to)])]
    for path in written:
        path.write_text(text)
    timeline = directory / "timeline.json"
    _soap_report.write_timeline(simulator, plan, timeline)
    written.append(timeline)
    with contextlib.suppress(dtensor_export.NotRegular):  # one mesh only
        code = dtensor_export.render(graph, plan, devices)
        (directory / "dtensor_plan.py").write_text(code)
        written.append(directory / "dtensor_plan.py")
    return written


def write_tables(
    compared: Sequence[_soap_report.Compared],
    operators: Sequence[_soap_operators.OperatorCompared],
    directory: Path,
) -> list[Path]:
    """Simulated against measured times, by strategy and by operator."""
    whole = directory / "simulated_against_measured.csv"
    _soap_report.write_csv(compared, whole)
    parts = directory / "simulated_against_measured_by_operator.csv"
    _soap_operators.write_csv(operators, parts)
    return [whole, parts]
