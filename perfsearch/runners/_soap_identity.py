"""Which job a directory of tables is of, so that they are taken for no other one's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perfsearch.config_options import show
from perfsearch.core.errors import BadInputError
from perfsearch.parallel.soap.graph import Graph
from perfsearch.workloads.spec import AUTO, TRAITS, WorkloadSpec

JOB = "job.json"
SCHEMA = 1

_BUILT_IN = re.compile(r"perfsearch[/\\]workloads[/\\](\w+)\.py:\d+$")
_ANYWHERE = re.compile(r"\.py:\d+$")


@dataclass(frozen=True)
class Identity:
    """The job that tables were measured for.

    Attributes:
        name: of the workload; empty where tables do not say.
        global_batch: samples of a step over all devices.
        size: of the workload; empty where tables do not say.
        factory: of a custom workload; ``None`` also where tables do not say.
        options: keys of the workload alone, those left to its size apart; ``None`` where tables do
            not say.

    """

    name: str
    global_batch: int
    size: str = ""
    factory: str | None = None
    options: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, workload: WorkloadSpec) -> Identity:
        """That of a workload, once its size and batch are settled."""
        assert workload.global_batch is not None
        options = _own_options(workload)
        return cls(workload.name, workload.global_batch, workload.size, workload.factory, options)

    @classmethod
    def read(cls, directory: Path, graph: Graph) -> Identity:
        """That of a directory, as far as it says; where its model was written, otherwise.

        Raises:
            BadInputError: the file cannot be used.

        """
        path = directory / JOB
        if not path.exists():
            return _of_graph(graph)
        try:
            record = json.loads(path.read_text())
            if record.pop("schema") != SCHEMA:
                raise ValueError(f"schema {SCHEMA} is needed")
            found = cls(**record)
            if not isinstance(found.name, str) or not isinstance(found.options, dict | None):
                raise TypeError("name is text, options are keys and values")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(
                f"{path}: not the name of a job: {error}. Remove the file to go by the graph alone"
            ) from error
        if found.global_batch != graph.batch:
            raise BadInputError(
                f"{path}: global_batch={found.global_batch}, and the graph beside it is of "
                f"{graph.batch} samples: they belong to different jobs"
            )
        return found

    def write(self, directory: Path) -> None:
        """Leave it beside the tables."""
        (directory / JOB).write_text(json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n")

    def __str__(self) -> str:
        words = ["model", self.name, self.size if self.size != self.name else "", self.factory]
        words += [f"{name}={show(value)}" for name, value in (self.options or {}).items()]
        return f"{' '.join(filter(None, words))} of global batch {self.global_batch}"

    def require(self, asked: WorkloadSpec, tables: str) -> None:
        """Refuse another job than this.

        Args:
            asked: the workload, as far as it is settled.
            tables: where this one comes from.

        Raises:
            BadInputError: naming the first key that differs.

        """
        different = next(self._differences(asked), None)
        if different is not None:
            raise BadInputError(
                f"{different}: runner.tables={tables} are of {self}. Leave workload.* out to plan "
                "for that (a search needs the same workload), or measure without runner.tables"
            )

    def _differences(self, asked: WorkloadSpec) -> Iterator[str]:
        if self.name and asked.name != self.name:
            yield f"workload={asked.name}"
        if self.size and asked.size not in (AUTO, self.size):
            yield f"workload.size={asked.size}"
        if self.options is not None:
            if asked.factory != self.factory:
                yield f"workload.factory={show(asked.factory)}"
            own = _own_options(asked)
            for name in sorted({*own, *self.options}):
                if own.get(name) != self.options.get(name):
                    yield f"workload.{name}={show(own.get(name))}"
        if asked.global_batch not in (None, self.global_batch):
            yield f"workload.global_batch={asked.global_batch}"


def is_given(workload: WorkloadSpec) -> bool:
    """Whether any ``workload.*`` key is another one than where nothing is asked for."""
    return replace(workload, options=_own_options(workload)) != WorkloadSpec()


def _own_options(workload: WorkloadSpec) -> dict[str, Any]:
    """What makes another model; of a custom workload only its factory does."""
    if workload.name == "custom":
        return {}
    return {name: value for name, value in workload.options.items() if value is not None}


def _of_graph(graph: Graph) -> Identity:
    """By the files that the model's operators were written in."""
    sources = [operator.source for operator in graph.planned]
    built_in = [match.group(1) for source in sources if (match := _BUILT_IN.search(source))]
    if built_in and built_in[0] in TRAITS:
        return Identity(built_in[0], graph.batch)
    return Identity("custom" if any(map(_ANYWHERE.search, sources)) else "", graph.batch)
