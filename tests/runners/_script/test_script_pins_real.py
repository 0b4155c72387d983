"""Knobs that are pinned in a search over a script are in force in all of it, or said not to be."""

from pathlib import Path

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Purpose, Status
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import Plan

SCRIPT = str(Path(__file__).parents[2] / "support" / "script_cases.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("wrap", "pins", "status", "line"),
    [
        ("ddp", {"bucket_cap_mb": 4, "gradient_as_bucket_view": True}, Status.OK, "bucket_cap_mb"),
        ("fully_shard", {"zero_stage": 2, "forward_prefetch": 1}, Status.OK, "reshard"),
        ("ddp", {"persistent_workers": True, "dataloader_workers": 0}, Status.NOT_APPLIED, ""),
    ],
)
def test_a_pin_is_in_force_in_every_start_and_in_what_is_handed_over(
    tmp_path, wrap, pins, status, line
):
    options = Script.Options((SCRIPT, "--wrap", wrap))
    nproc = 2 if status is Status.OK else 1  # which shows as well what is not in force
    environment = Environment(tmp_path, nproc=nproc, limits=Limits(120, 90, 5))
    runner = Script("cpu", {"gc_each_steps": [0, 50], **pins}, options, environment)
    try:
        runner.open(tmp_path)
        assert pins.items() <= runner.pinned.items()
        for number, fresh in enumerate((False, False, True)):
            plan = Plan(
                number, Purpose.SEARCH if number else Purpose.BASELINE, fresh=fresh,
                log_directory=tmp_path / "logs" / str(number), scored_seconds=0.05,
                time_limit_s=90.0,
            )  # fmt: skip
            outcome = runner.measure({"gc_each_steps": (0, 50, 0)[number]}, plan)
            assert outcome.status is status, outcome.reason
            found = outcome.measurement.in_force
            if status is Status.OK:
                assert {name: found[name] for name in pins} == pins
        assert status is Status.OK or "persistent_workers=true was asked for" in outcome.reason
        files = runner.export(runner.baseline, tmp_path / "apply")
        assert line in "".join(file.read_text() for file in files)
        if status is Status.OK:
            assert runner.settings_of(runner.baseline) == {"knobs": pins}
    finally:
        runner.close()
