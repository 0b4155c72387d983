"""What MLflow's own UI shows of searches at the address that is printed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser
from support.search_runs import LocalStore, Search, trial

from perfsearch.tracking.location import how_to_open, locate

pytestmark = pytest.mark.slow

LONGEST_S = 240

CURVES = (
    "[...document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line')]"
    ".filter(line => (line.getAttribute('d').match(/[LCQHV]/g) || []).length >= 2)"
)
"""Lines of at least three points in charts, which leave out those on a straight line."""


@pytest.fixture
def server(store: LocalStore) -> Iterator[str]:
    """Where MLflow's UI serves the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store.uri]
    log = (store.directory / "ui.log").open("wb")
    process = subprocess.Popen(
        [*words, "--workers", "1", "--port", str(port)],
        stdout=log,
        stderr=log,
        cwd=store.directory,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + LONGEST_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                said = Path(log.name).read_text()
                assert time.monotonic() < deadline and process.poll() is None, said
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def searched(store: LocalStore, strategy: str, costs: list[float]) -> None:
    """A search of so many trials that came to a gain."""
    parameters = {"runner": "ddp", "strategy": strategy, "seed": 1}
    search = Search(store, strategy, parameters)
    for number, cost in enumerate(costs):
        values = {"bucket_cap_mb": 25 + number, "algorithm": None}
        search.trials(trial(number, cost=cost, objective=100 / cost, configuration=values))
    now = time.time()
    samples = [
        {"time_s": float(i), "unix_s": now + i, "cpu_utilization_percentage": 50.0 + i * i % 7}
        for i in range(9)
    ]
    lines = "".join(f"{json.dumps(sample)}\n" for sample in samples)
    (search.run_dir / "system.jsonl").write_text(lines)
    tags = {"perfsearch.best_trial": "1", "perfsearch.verdict": "gain"}
    search.summarise({"search/speed_up": costs[0] / costs[-1]}, tags, files=["system.jsonl"])
    assert search.end()


def test_the_printed_address_shows_the_searches_and_their_curves(
    store: LocalStore, server: str, browser: Browser
) -> None:
    searched(store, "bayes", [2.0, 1.5, 1.0])
    searched(store, "random", [2.0, 2.5, 1.6])
    experiment = store.client.get_experiment_by_name("exp").experiment_id
    _, printed = how_to_open(locate(store.uri), experiment).splitlines()
    address = printed.replace("http://127.0.0.1:5000", server)

    page = browser.open(address, 1600)
    page.wait_for("document.body.innerText.includes('ddp bayes seed=1: +100%')")
    assert page.evaluate("document.body.innerText.includes('ddp random seed=1: +25%')")
    keep(page, "runs")
    columns = page.wait_for(
        "(found => found.includes('objective/value') && found)"
        "([...document.querySelectorAll('.ag-header-cell')].map(cell => cell.innerText.trim()))"
    )
    assert {"Run Name", "objective/value", "objective/speed_up"} <= set(columns)
    assert not {"Dataset", "Models", "Source"} & set(columns)
    page.close()

    page = browser.open(f"{address}&compareRunsMode=CHART", 1600)
    page.wait_for("document.body.innerText.includes('best/speed_up')")
    page.wait_for(f"{CURVES}.length >= 4")  # of both searches in each of the two charts
    keep(page, "curves")
    page.close()

    run_id = store.runs("search")[0].info.run_id
    page = browser.open(f"{server}/#/experiments/{experiment}/runs/{run_id}/system-metrics", 1600)
    page.wait_for("document.body.innerText.includes('cpu_utilization_percentage')")
    page.wait_for(f"{CURVES}.length >= 1")
    keep(page, "system")
    page.close()


def keep(page, name):
    if directory := os.environ.get("PERFSEARCH_SCREENSHOTS"):
        page.screenshot(Path(directory) / f"mlflow_{name}.png", whole=False)
