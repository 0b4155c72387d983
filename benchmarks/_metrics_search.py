"""A search as the command does it, without Hydra and MLflow, which a bare machine may lack."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from perfsearch.cli.view import View
from perfsearch.config.schema import validate
from perfsearch.core.journal import Journal
from perfsearch.core.trial import Trial
from perfsearch.pipeline import baseline, confirm, explore
from perfsearch.pipeline.search import build_runner, strategy_factory
from perfsearch.pipeline.session import Session, Verdict


class NoTracker:
    """No MLflow here."""

    def trial(self, trial: Trial) -> None:
        """Take no note."""


def search(
    size: str,
    knobs: dict[str, Any],
    seconds: float,
    confirm_seconds: float,
    device: str = "cuda",
) -> tuple[Session, Verdict]:
    """Search the job's knobs for ``seconds``; confirm the best against the baseline."""
    with tempfile.TemporaryDirectory() as name:
        settings = validate(
            {
                "runner": {"name": "ddp", "device": device, "knobs": knobs},
                "strategy": {"name": "auto"},
                "workload": {"name": "gpt", "size": size},
                "budget": {"trials": 25, "seconds": seconds},
                "confirm": {"finalists": 1, "max_repeats": 4, "seconds": confirm_seconds},
                "sentinel_every": 0,
                "limits": {"startup_s": 240},
                "run_dir": name,
            }
        )
        runner = build_runner(settings)
        runner.open(Path(name))
        try:
            trials: list[Trial] = []
            strategy = strategy_factory(settings)(runner.space, runner.hints(trials))
            journal = Journal(Path(name) / "journal.jsonl", {})
            session = Session(
                settings, runner, strategy, journal, View(settings.objective), NoTracker(),  # type: ignore[arg-type]
                Path(name), trials,
            )  # fmt: skip
            baseline.run(session)
            reason = baseline.reason_to_stop(session) or explore.run(session)
            print(f"search ended: {reason}", flush=True)
            verdict = confirm.run(session)
            journal.close()
        finally:
            runner.close()
    return session, verdict
