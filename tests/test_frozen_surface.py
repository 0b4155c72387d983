"""What other programs read of a search changes on purpose only, and in these lists too.

``PERFSEARCH_UPDATE=1`` writes the lists anew.
"""

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

from perfsearch.cli.view import View
from perfsearch.config.options import plain_value
from perfsearch.config.schema import Settings, validate
from perfsearch.core.hints import ChainResult
from perfsearch.core.journal import EVENTS
from perfsearch.pipeline.search import search, strategy_factory
from perfsearch.runners.base import Screens
from perfsearch.runners.replay import Replay

DATA = Path(__file__).parent / "data"

TABLE = """bucket,algorithm,status,samples_per_s,step_ms,peak_allocated_gib
1,ring,ok,10,9 9 9,1
2,ring,ok,20,4.5 4.5 4.5,1
4,ring,oom,,,
8,ring,ok,20,5 5 5,1
1,tree,ok,10,9 9 9,1
2,tree,ok,10,9 9 9,1
"""

OPEN = {"configuration", "in_force", "phases_ms", "environment", "system", "bottleneck_evidence"}
OPEN |= {"identity", "pinned", "options", "baseline", "intervals"}
OPEN |= {"parameters", "numbers", "tags", "series"}
"""Mappings whose keys are names of knobs, phases, sensors or options, or numbers of trials; those
that MLflow has are frozen there.
"""

OF_THIS_PLACE = ("mlflow.source.", "mlflow.user")
"""Tags by which MLflow says of itself who ran what, as far as it can tell here."""


class Cautious(Replay, Screens):
    """Refuses one configuration by arithmetic; several trials at a time have a host in common."""

    shares_host = True

    def screen(self, configuration):
        return "too large" if configuration["bucket"] == 8 else None


def chaining(settings):
    """Builds the strategy, which first runs a chain over simulated configurations."""

    def build(space, hints):
        strategy = strategy_factory(settings)(space, hints)
        strategy.chain_results.append(ChainResult([], [(1, 0.3, 0.2, 0.1)], "chained"))
        return strategy

    return build


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Directory of a search that comes to a confirmed gain, with every event in its journal."""
    directory = tmp_path_factory.mktemp("frozen")
    (directory / "table.csv").write_text(TABLE)
    settings = validate(
        {
            "runner": {"name": "replay", "table": str(directory / "table.csv")},
            "strategy": {"name": "grid"},
            "workload": {"name": "mlp"},
            "confirm": {"finalists": 1, "max_repeats": 3},
            "sentinel_every": 2,
            "parallel_trials": 2,
            "run_dir": str(directory / "run"),
            "tracking": {"uri": f"sqlite:///{directory / 'mlflow.db'}", "experiment": "frozen"},
        }
    )
    with View(stream=(directory / "out.txt").open("w")) as view:
        search(settings, Cautious.from_settings(settings), chaining(settings), view)
    return directory / "run"


def frozen(name, lines):
    """Compare with a list, or write it anew where that is asked for."""
    file = DATA / name
    if os.environ.get("PERFSEARCH_UPDATE"):
        file.write_text("\n".join(lines) + "\n")
    assert lines == file.read_text().splitlines()


def paths(node, prefix):
    """Where there is something in a line of the journal, its open mappings as one key."""
    if isinstance(node, Mapping) and prefix.rpartition(".")[2] in OPEN:
        yield f"{prefix}.*"
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from paths(value, f"{prefix}.{key}")
    else:
        yield prefix


def test_the_journals_schema_is_frozen(run_dir):
    header, *events = map(json.loads, (run_dir / "journal.jsonl").read_text().splitlines())
    assert {event["event"] for event in events} == set(EVENTS)
    found = set(paths(header, "header"))
    for event in events:
        found.update(paths(event, event.pop("event")))
    found -= {f"{path.removesuffix('.*')}" for path in found if path.endswith(".*")}
    whole = {p for p in found if not any(o.startswith(f"{p}.") for o in found)}  # null once
    frozen("journal_schema.txt", sorted(whole))


def keys(cls, prefix=""):
    """A line for each setting: its type, its default and its range."""
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind) and field.default_factory is not dataclasses.MISSING:
            yield from keys(kind, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = "needed" if default is dataclasses.MISSING else f"= {plain_value(default)!r}"
        limits = "".join(f" {how} {bound!r}" for how, bound in sorted(field.metadata.items()))
        yield f"{prefix}{field.name}: {field.type} {shown}{limits}"


def test_the_settings_schema_is_frozen():
    frozen("settings_schema.txt", sorted(keys(Settings)))


def test_mlflows_keys_are_frozen(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("frozen")
    found = set()
    for run in client.search_runs([experiment.experiment_id]):
        role = run.data.tags["perfsearch.role"]
        for kind in ("params", "metrics", "tags"):
            found.update(f"{role} {kind} {key}" for key in getattr(run.data, kind))
        found.update(f"{role} artifacts {path}" for path in artifacts(client, run.info.run_id))
    ours = [line for line in found if not line.split(" ", 2)[2].startswith(OF_THIS_PLACE)]
    frozen("mlflow_keys.txt", sorted(ours))


def artifacts(client, run_id, directory=None):
    for file in client.list_artifacts(run_id, directory):
        if file.is_dir:
            yield from artifacts(client, run_id, file.path)
        else:
            yield file.path
