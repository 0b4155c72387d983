"""Prior searches in a tracking store, read back as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perfsearch.core.knob import Kind, Knob, Value
from perfsearch.core.objective import Metric
from perfsearch.core.trial import Purpose, Status
from perfsearch.tracking import names, store
from perfsearch.tracking.client import Client, connect
from perfsearch.tracking.location import (
    StoreLocation,
    cause_of,
    why_unreachable,
    without_credentials,
)

_KNOB, _PINNED = "knob/", "pinned/"
_NULLS = ("null", "none", "-1")
"""What stands for ``null``: where a knob is held, and where it is searched."""
_COST_METRICS: Mapping[Metric, tuple[Sequence[str], bool]] = {
    Metric.THROUGHPUT: (("throughput/samples_per_s", "throughput/steps_per_s"), True),
    Metric.LATENCY: (("step_time/p50_ms",), False),
    Metric.FLOPS: (("throughput/device/tflops",), True),
}
"""What a trial's run says of each objective (all of a search the same one), and whether more of it
is better."""


class PriorSearchError(LookupError):
    """A store without the search that was named; the message says what it has instead."""


class StoreError(OSError):
    """A store that does not answer, or not as it should."""


@dataclass(frozen=True)
class StoredTrial:
    """A trial's run that ended well.

    Attributes:
        purpose: why it was run.
        configuration: the searched knobs' values as texts.
        cost: relative to the search's other trials; smaller is better.

    """

    purpose: Purpose
    configuration: Mapping[str, str]
    cost: float


@dataclass(frozen=True)
class StoredSearch:
    """A search's run.

    Attributes:
        run_id: in the store.
        name: as shown there.
        search_id: the same after a resume.
        experiment_id: of the experiment that it is in.
        parameters: as ``perfsearch.pipeline.resume`` writes them: ``runner``, ``workload``,
            ``identity/...``, ``pinned/...`` and others.

    """

    run_id: str
    name: str
    search_id: str
    experiment_id: str
    parameters: Mapping[str, str]

    @property
    def pinned(self) -> dict[str, str]:
        """The knobs that it held at one value, by the names in its params."""
        given = self.parameters.items()
        return {key.removeprefix(_PINNED): v for key, v in given if key.startswith(_PINNED)}


class PriorSearches:
    """Reads searches from a store; opening it takes seconds.

    Every method may raise ``StoreError``, and so does this.

    Args:
        location: the store.

    """

    def __init__(self, location: StoreLocation) -> None:
        self._where = without_credentials(location.uri)
        why = why_unreachable(location.uri) if location.is_server else ""
        if why:
            raise StoreError(why)
        with self._asking():
            self._client: Client = connect(location)

    def of_runner(self, experiment: str, runner: str) -> list[StoredSearch]:
        """The searches of an experiment that used ``runner``, latest first."""
        rule = f"tags.`{store.ROLE}` = 'search' and params.`runner` = '{runner}'"
        with self._asking():
            experiment_id = self._client.experiment_id(experiment)
            found = self._client.search(experiment_id, rule) if experiment_id is not None else []
        return [_search(run) for run in reversed(found)]

    def by_id(self, run_id: str) -> StoredSearch:
        """The search whose run has this id.

        Raises:
            PriorSearchError: there is no such run, or it is no search's.

        """
        with self._asking():
            run = self._client.run(run_id)
        if run is None:
            raise PriorSearchError(f"there is no such run in {self._where}")
        role = run.data.tags.get(store.ROLE)
        if role != "search":
            parent = run.data.tags.get("mlflow.parentRunId")
            other = f"; its search is {parent}" if role == "trial" and parent else ""
            raise PriorSearchError(f"that run is no search of perfsearch{other}")
        return _search(run)

    def trials(self, search: StoredSearch, metric: Metric) -> Iterator[StoredTrial]:
        """The trials of a search that were measured, in order; failures and bounds are left out."""
        rule = f"tags.`{store.SEARCH_ID}` = '{search.search_id}' and tags.`{store.ROLE}` = 'trial'"
        names_of_cost, more_is_better = _COST_METRICS[metric]
        with self._asking():
            found = self._client.search(search.experiment_id, rule)
        for run in sorted(found, key=lambda run: int(run.data.tags[store.TRIAL])):
            tags, metrics = run.data.tags, run.data.metrics
            value = next((metrics[name] for name in names_of_cost if name in metrics), None)
            ended_well = tags.get("perfsearch.status") == Status.OK.value
            if not ended_well or value is None or value <= 0:
                continue
            knobs = {
                key.removeprefix(_KNOB): text
                for key, text in run.data.params.items()
                if key.startswith(_KNOB)
            }
            purpose = Purpose(tags["perfsearch.purpose"])
            yield StoredTrial(purpose, knobs, 1.0 / value if more_is_better else value)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # MLflow raises whatever its database or the network does
            raise StoreError(f"{self._where} cannot be read: {cause_of(error)}") from error


def stands_for(text: str, value: Value) -> bool:
    """Whether a run's param is a value: ``64`` and ``64.0`` are one, ``1`` and ``true`` are two."""
    if names.plain(value) == text or (value is None and text in _NULLS):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return float(text) == value
    except ValueError:
        return False


def value_of(knob: Knob, text: str) -> Value:
    """The value of ``knob`` that a run's param stands for.

    Raises:
        LookupError: it is none of the knob's values.

    """
    for value in (*knob.values, knob.default):
        if stands_for(text, names.null_value(knob) if value is None else value):
            return value
    if knob.is_range:
        try:
            number = int(text) if knob.kind is Kind.INTEGER else float(text)
        except ValueError:
            raise LookupError(f"knob {knob.name}: {text!r} is no number") from None
        if knob.contains(number):
            return number
    raise LookupError(f"knob {knob.name}: {text!r} is not one of its values")


def _search(run: Any) -> StoredSearch:
    return StoredSearch(
        run_id=str(run.info.run_id),
        name=str(run.info.run_name),
        search_id=str(run.data.tags.get(store.SEARCH_ID, "")),
        experiment_id=str(run.info.experiment_id),
        parameters=dict(run.data.params),
    )
