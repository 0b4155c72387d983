"""A runner with a known surface, and a view and a tracker that keep what they were told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from perfsearch.core.journal import Event, Journal
from perfsearch.core.knob import Configuration, Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status, Trial
from perfsearch.pipeline.cards import Card
from perfsearch.runners.base import Plan, Runner, Screens


class SyntheticRunner(Runner, Screens):
    """Step time = 0.1 s x (1 + distance to the optimum), with seeded noise."""

    def __init__(
        self,
        spread: float = 0.01,
        seed: int = 0,
        fail: Callable[[Configuration, Plan], Outcome | None] = lambda c, p: None,
        screen: Callable[[Configuration], str | None] = lambda c: None,
        identity: dict[str, str] | None = None,
        gain: float = 0.2,
    ) -> None:
        self.space = Space(
            [
                Knob("bucket", Kind.ORDINAL, 1, values=(1, 2, 4, 8, 16, 32)),
                Knob("view", Kind.BOOLEAN, False),
            ]
        )
        self.baseline = {"bucket": 1, "view": False}
        self.plans: list[Plan] = []
        self.spread, self.seed, self.gain = spread, seed, gain
        self._fail, self._screen, self._identity = fail, screen, identity or {"model": "synthetic"}
        self.closed = False

    def open(self, run_dir: Path) -> None:
        self.opened = run_dir

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        self.plans.append(plan)
        failure = self._fail(configuration, plan)
        if failure is not None:
            return failure
        position = self.space.encode([configuration])[0]
        step = 0.1 * (1 - self.gain * (position[0] + 0.5 * bool(configuration["view"])))
        generator = np.random.default_rng([self.seed, plan.number])
        level = generator.normal(0, self.spread)
        steps = step * np.exp(level + generator.normal(0, self.spread, 8))
        measurement = Measurement(
            steps.tolist(), samples_per_step=32, first_losses=[3.0, 2.5], in_force={}
        )
        return Outcome(Status.OK, measurement, fresh_process=plan.fresh)

    def screen(self, configuration: Configuration) -> str | None:
        return self._screen(configuration)

    def identity(self) -> dict[str, str]:
        return self._identity

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "env.sh"
        path.write_text(f"export BUCKET={configuration['bucket']}\n")
        return [path]

    def close(self) -> None:
        self.closed = True


class KeptView:
    """Keeps every line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.cards: list[dict[str, str]] = []
        self.verdict = ""

    def stage(self, name: str, detail: str = "") -> None:
        self.lines.append(f"stage {name} {detail}")

    def trial_started(self, number: int, purpose: Purpose, configuration: Any) -> None:
        self.lines.append(f"start {number}")

    def trial_finished(self, trial: Trial, best: Any, baseline: Any, left: Any) -> None:
        self.lines.append(f"end {trial.number} {trial.status}")

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def expects(self, trials: int) -> None:
        self.lines.append(f"expects {trials} trials")

    def table(self, rows: list[list[str]]) -> None:
        self.lines += ["  ".join(cells) for cells in rows]

    def card(self, card: Card) -> None:
        self.cards.append({row.label: row.text for row in card.rows if row.label})
        self.verdict = self.cards[-1].get("verdict", "")

    def result(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class KeptTracker:
    """Keeps every trial and the summary that the journal tells of."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.numbers: dict[str, float] = {}
        self.status = ""
        self.destination: dict[str, str] = {}
        self.run_id = None

    def open(self, journal: Journal) -> None:
        journal.followers.append(self._follow)

    def _follow(self, event: Event) -> None:
        if event.name == "finished":
            self.trials.append(Trial.from_json(event.data["trial"]))
        elif event.name == "summarised":
            self.numbers, self.tags = event.data["numbers"], event.data["tags"]
            self.note = event.data["note"]

    def close(self, status: str) -> None:
        self.status = status

    def how_to_open(self) -> str:
        return ""


def interrupt_at(number: int):
    """A ``fail`` that is a Ctrl-C in that trial."""

    def fail(configuration, plan):
        if plan.number == number:
            raise KeyboardInterrupt
        return None

    return fail
