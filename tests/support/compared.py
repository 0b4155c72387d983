"""Jobs to compare: a script whose step takes as long as it is told, and arms without processes."""

import subprocess

import numpy as np

from perfsearch.core.hardware import Environment, Hardware
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Measurement, Outcome, Status
from perfsearch.runners._arms import ARM, Arms

SCRIPT = """
import argparse, time, torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.010)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--rate", type=float, default=0.01)
given = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, given.width), torch.nn.Linear(given.width, 1))
data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=given.rate)
for epoch in range(20):
    for x, y in DataLoader(data, batch_size=8):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(given.sleep)
"""


def git(directory, *words):
    """Run git as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True)


class FakeArms(Arms):
    """Arms of known step times; ``fail`` gives the outcome of a start that is no measurement.

    Where ``windows`` says how many each needs, they are measured in turns; ``did`` tells of it.
    """

    def __init__(
        self, steps, noise=0.005, seed=0, fail=lambda name, start: None, losses=None, windows=None
    ):
        self.arms = dict.fromkeys(steps)
        self.steps, self.noise, self.fail, self.losses = steps, noise, fail, losses or {}
        self.environment = Environment(None)
        self.hardware = Hardware("cpu", 1, 1, (), 1)
        names = tuple(steps)
        self.space = Space([Knob(ARM, Kind.CATEGORICAL, names[0], names)])
        self.baseline = {ARM: names[0]}
        self.said, self.starts = [], []
        self.windows, self.in_turns = windows, windows is not None
        self.did, self.against = [], ""
        self.in_window = lambda name, made: None
        self._reference = None
        self.generator = np.random.default_rng(seed)

    def open(self, run_dir):
        pass

    def device_set(self):
        return ""

    def measure(self, configuration, plan):
        name = configuration[ARM]
        self.starts.append(name)
        failed = self.fail(name, self.starts.count(name))
        if failed is not None:
            return failed
        step_s = self.steps[name] * np.exp(self.noise * self.generator.normal())
        losses = self.losses.get(name, [3.0, 2.5])
        measured = Measurement([float(step_s)] * 8, 32, first_losses=losses)
        outcome = Outcome(Status.OK, measured, fresh_process=True)
        return self._same_work(configuration, outcome)

    def measure_in_turns(self, configuration, plan):
        name, made = configuration[ARM], 0
        self.did.append(("starts", name))
        try:
            while (yield made >= self.windows[name]):
                self.did.append(("window", name))
                made += 1
                failed = self.in_window(name, made)
                if failed is not None:
                    return failed
            return self.measure(configuration, plan)
        finally:
            self.did.append(("ends", name))

    def why_not_in_turns(self):
        return self.against

    def identity(self):
        return {f"arm {name}": name for name in self.arms}

    def not_as_before(self):
        return []

    def close(self):
        pass
