"""A small search over the synthetic runner, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch.config.schema import Settings, validate
from perfsearch.pipeline.search import search as run_search
from perfsearch.pipeline.session import Result
from perfsearch.strategies import load
from perfsearch.strategies.base import Strategy


def make_settings(**changes: Any) -> Settings:
    plain: dict[str, Any] = {
        "runner": {"name": "replay"},
        "strategy": {"name": "random"},
        "workload": {"name": "mlp"},
        "budget": {"trials": 12, "seconds": None},
        "sentinel_every": 5,
        "tracking": {"enabled": False},
    }
    return validate({**plain, **changes})


class Search:
    """Runs searches in one directory and keeps the parts of the last one."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.view = KeptView()
        self.tracker = KeptTracker()
        self.runner = SyntheticRunner()
        self.strategy: type[Strategy] | None = None

    def __call__(self, runner: SyntheticRunner | None = None, **changes: Any) -> Result:
        settings = make_settings(**{"run_dir": str(self.run_dir), **changes})
        self.runner = runner or SyntheticRunner()
        self.view, self.tracker = KeptView(), KeptTracker()
        strategy = self.strategy or load(settings.strategy.name)
        return run_search(
            settings,
            self.runner,
            lambda space, hints: strategy(space, hints, settings.seed),
            self.view,
            lambda settings, run_dir, search_id: self.tracker,
        )


@pytest.fixture
def search(tmp_path: Path) -> Search:
    """Searches in a directory of the test's own."""
    return Search(tmp_path / "run")
