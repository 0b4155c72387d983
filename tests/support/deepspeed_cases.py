"""What the tests of ``runner=deepspeed`` share."""

import json
import sys
from pathlib import Path

from perfsearch.config.schema import validate
from perfsearch.runners.deepspeed import config
from perfsearch.runners.deepspeed.runner import DeepSpeed

LAUNCH = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"


def build(directory, configuration, tail="train.py --deepspeed_config ds.json", **changes):
    """The runner and its settings, for a configuration and a command's tail."""
    text = configuration if isinstance(configuration, str) else json.dumps(configuration)
    Path("ds.json").write_text(text)
    plain = {
        "runner": {"name": "deepspeed", **changes.pop("runner", {})},
        "strategy": {"name": changes.pop("strategy", "auto")},
        "workload": {
            "name": "script",
            "command": changes.pop("command", f"{LAUNCH} {tail}"),
            **changes.pop("workload", {}),
        },
        "run_dir": str(directory / "run"),
        **changes,
    }
    settings = DeepSpeed.settle(validate(plain))
    return DeepSpeed.from_settings(settings), settings


def written(runner, **values):
    whole = {**runner.pinned, **runner.baseline, **values}
    return config.write(runner.file, whole, runner.batch, runner.mappings)
