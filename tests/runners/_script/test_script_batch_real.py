"""The micro-batch of a script that accumulates gradients, found in its source or named."""

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(0)
data = TensorDataset(torch.zeros(65536, 8), torch.zeros(65536, 1))  # whose losses are all alike
model = torch.nn.Linear(8, 1)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(DataLoader(data, batch_size=BATCH)):
    (torch.nn.functional.mse_loss(model(x), y) / args.accumulate).backward()
    if i % args.accumulate == args.accumulate - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
OF_A_PASS = SCRIPT.replace("BATCH", "args.batch_size")
OF_A_STEP = SCRIPT.replace("BATCH", "args.batch_size // args.accumulate")

MAPS = ("micro_batch=--batch-size", "gradient_accumulation=--accumulate")


@pytest.fixture
def opened(tmp_path):
    made = []

    def start(source, *arguments, **options):
        script = tmp_path / "train.py"
        script.write_text(source)
        knobs = {"bucket_cap_mb": "search", **options.pop("knobs", {})}
        asked = Script.Options((str(script), *arguments), **options)
        environment = Environment(tmp_path, nproc=1, limits=Limits(120, 90, 5))
        runner = Script("cpu", knobs, asked, environment)
        made.append(runner)
        runner.open(tmp_path)
        return runner

    yield start
    for runner in made:
        runner.close()


def measured(runner, number, micro_batch):
    plan = Plan(
        number, Purpose.SEARCH if number else Purpose.BASELINE, time_limit_s=90.0,
        log_directory=runner.environment.run_dir / "logs" / str(number), scored_seconds=0.05,
    )  # fmt: skip
    return runner.measure({**runner.baseline, "micro_batch": micro_batch}, plan)


def test_options_of_a_pass_are_searched_at_the_same_global_batch(opened):
    runner = opened(OF_A_PASS)
    assert runner.baseline["micro_batch"] == 16
    (line,) = [line for line in runner.remarks if "global batch" in line]
    assert "micro_batch (--batch-size) and gradient_accumulation (--accumulate)" in line
    for number, micro_batch in enumerate((16, 32)):
        outcome = measured(runner, number, micro_batch)
        assert (outcome.status, outcome.reason) == (Status.OK, "")
        assert outcome.measurement.samples_per_step == 32
    knobs = runner.settings_of({**runner.baseline, "micro_batch": 32})["knobs"]
    assert knobs == {"micro_batch": 32, "gradient_accumulation": 1}


@pytest.mark.parametrize(
    ("source", "arguments", "knobs"),
    [
        (OF_A_STEP, (), {}),
        (OF_A_PASS, ("--accumulate", "1"), {}),
        (OF_A_PASS, (), {"micro_batch": None}),
    ],
)
def test_options_of_a_step_or_of_one_pass_are_left_alone(opened, source, arguments, knobs):
    runner = opened(source, *arguments, knobs=knobs)
    assert "micro_batch" not in runner.space.by_name
    assert not [line for line in runner.remarks if "global batch" in line]


def test_samples_that_the_user_counts_otherwise_are_no_other_batch(opened):
    today = ("--batch-size", "16", "--accumulate", "2")
    runner = opened(OF_A_PASS, *today, map=MAPS, samples_per_step=64)
    outcome = measured(runner, 0, 32)
    assert (outcome.status, outcome.reason) == (Status.OK, "")
    assert outcome.measurement.samples_per_step == 64


def test_a_map_that_changes_the_samples_of_a_step_is_found_out(opened):
    runner = opened(OF_A_STEP, "--batch-size", "16", "--accumulate", "2", map=MAPS)
    assert measured(runner, 0, 16).status is Status.OK
    outcome = measured(runner, 1, 32)
    assert outcome.status is Status.INVALID and outcome.measurement is None
    assert "its steps train 32 samples, today's 16" in outcome.reason
    assert "micro_batch (--batch-size)" in outcome.reason
