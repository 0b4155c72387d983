"""A search is the same search, wherever its ranks start."""

import pytest
from support.small_search import make_settings
from support.synthetic import KeptTracker, KeptView

from perfsearch.core.journal import read
from perfsearch.pipeline.search import build_runner, search, strategy_factory
from perfsearch.workers import launchers

CLOCK = {"unix_s", "pid", "seconds", "search_seconds", "search/seconds", "confirm/seconds"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Measurements with noise, of which a replay draws by the seed."""
    steps = " ".join(str(9 + (n * 7) % 5) for n in range(20))
    rows = [
        f"{bucket},{static},ok,{10 + bucket / 64},{steps}"
        for bucket in (1, 4, 16, 25, 64, 128)
        for static in ("false", "true")
    ]
    file = tmp_path_factory.mktemp("table") / "table.csv"
    file.write_text("\n".join(["bucket_cap_mb,static_graph,status,samples_per_s,step_ms", *rows]))
    return file


def journal(name, table, run_dir):
    """What is recorded of a search with this launcher, but for the clock."""
    settings = make_settings(
        runner={"name": "replay", "table": str(table)},
        strategy={"name": "bayes"},
        launcher={"name": name},
        budget={"trials": 6, "seconds": None},
        seed=7,
        run_dir=str(run_dir),
    )
    runner = build_runner(settings)
    search(settings, runner, strategy_factory(settings), KeptView(), lambda *a: KeptTracker())
    _, events = read(run_dir / "journal.jsonl")
    return [(event.name, without_clock(event.data)) for event in events]


def without_clock(value):
    if not isinstance(value, dict):
        return value
    return {key: without_clock(v) for key, v in value.items() if key not in CLOCK}


def test_the_same_search_proposes_and_records_the_same_with_every_launcher(table, tmp_path):
    first, *others = [journal(name, table, tmp_path / name) for name in launchers.names()]
    assert sum(name == "told" for name, _ in first) >= 7
    for other in others:
        assert other == first
