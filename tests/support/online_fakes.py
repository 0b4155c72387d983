"""Ranks and a strategy that need no processes: an analytic objective behind the real controller."""

import math

from perfsearch.core.space import key_of
from perfsearch.online.proposer import Service
from perfsearch.online.store import APPLY, END, RUN, Report

BASELINE = {
    "bucket_cap_mb": 25.0,
    "first_bucket_mb": 1.0,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "hierarchical_group_size": 0,
    "optimizer_implementation": "default",
}


def facts(**changes):
    return {
        "device": "cuda",
        "ranks_per_node": 4,
        "nodes": 1,
        "gradient_mib": 500.0,
        "wrapper_parameters": [
            "bucket_cap_mb", "bucket_cap_mb_list", "gradient_as_bucket_view", "static_graph",
        ],
        "configuration": dict(BASELINE),
        "fixed": {},
        "options": {},
        **changes,
    }  # fmt: skip


class Inline:
    """The real proposer, answering in this process; ``late`` calls of ``answer`` find nothing."""

    def __init__(self, late=0):
        self._service, self._answers, self._late = Service(), [], late
        self.told = []

    def _send(self, request):
        answer = self._service.answer(request)
        if answer is not None:
            self._answers.append(answer)

    def open(self, facts, options):
        self._send({"do": "open", "facts": dict(facts), "options": dict(options)})

    def tell(self, trial):
        self.told.append(trial)
        self._send({"do": "tell", "trial": trial.to_json()})

    def ask(self):
        self._send({"do": "ask"})

    def answer(self, within_s):
        if self._late:
            self._late -= 1
            return None
        return self._answers.pop(0)


class Recorder:
    def __init__(self):
        self.rows, self.said, self.knobs = [], [], None

    def open(self, knobs):
        self.knobs = knobs

    def write(self, entry):
        self.rows.append(entry)

    def say(self, text):
        self.said.append(text)


class Job:
    """Two ranks that take ``seconds(configuration, rank, step)``; some configurations fail."""

    def __init__(self, seconds, start=BASELINE, refuses=lambda configuration: "", facts=None):
        self._seconds, self._refuses = seconds, refuses
        self._facts = facts
        self.configuration = dict(start)
        self.steps = 0
        self.history = []
        self.now_s = 0.0
        self.ended = None

    def clock(self):
        return self.now_s

    def run(self, controller, most_steps=100_000):
        steps = controller.run()
        next(steps)
        found = self._facts or facts(configuration=dict(self.configuration))
        reports = [Report(self._train(0), facts=found), Report(self.steps, facts=found)]
        while self.steps < most_steps:
            try:
                instruction = steps.send(reports)
            except StopIteration:
                return
            if instruction.kind == END:
                self.ended = instruction
                return
            if instruction.kind == APPLY:
                failure = self._refuses(instruction.configuration)
                if not failure:
                    self.configuration = dict(instruction.configuration)
                reports = [Report(self.steps), Report(self.steps, failure)]
                continue
            assert instruction.kind == RUN
            timed = []
            for _ in range(instruction.discard + instruction.score):
                self._train(1)
                pair = [self._seconds(self.configuration, rank, self.steps) for rank in range(2)]
                self.history.append((key_of(self.configuration), max(pair)))
                self.now_s += max(pair)
                timed.append(pair)
            discard = instruction.discard
            reports = [
                Report(
                    self.steps,
                    discarded_s=[t[rank] for t in timed[:discard]],
                    step_s=[t[rank] for t in timed[discard:]],
                )
                for rank in range(2)
            ]

    def _train(self, steps):
        self.steps += steps
        return self.steps


def valley(configuration, rank=0, step=0, best_mb=64.0, base_s=0.1):
    """Seconds of a step: least at one bucket size, with a small gain from views; rank 1 lags."""
    away = math.log2(float(configuration["bucket_cap_mb"]) / best_mb)
    view = 0.98 if configuration["gradient_as_bucket_view"] else 1.0
    return base_s * (1 + 0.02 * away**2) * view * (1.01 if rank else 1.0)
