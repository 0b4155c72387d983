"""The example scripts: as they are, and tuned from outside; the same training."""

import importlib.util
import re
from pathlib import Path

import pytest
from support.started_scripts import losses, run

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent.parent / "examples" / "scripts"

# script, what it needs, its arguments, options of perfsearch-run, knobs that must be in force
CASES = {
    "ddp_train.py": (
        [], ["--epochs", "1", "--batch-size", "512", "--width", "32"],
        ["--map", "micro_batch=--batch-size", "--map", "gradient_accumulation=--accumulate"],
        {"bucket_cap_mb": 1.0, "optimizer_implementation": "foreach"},
    ),
    "images_train.py": (
        ["numpy"], ["--epochs", "1", "--size", "32"], [], {"dataloader_workers": 1},
    ),
    "hf_trainer.py": (
        ["transformers", "accelerate"],
        ["--output_dir", "out", "--max_steps", "4", "--use_cpu", "True", "--ddp_backend", "gloo",
         "--report_to", "none", "--save_strategy", "no"],
        ["--preset", "hf-trainer"],
        {"bucket_cap_mb": 1.0, "micro_batch": 4, "gradient_accumulation": 2},
    ),
    "lightning_train.py": (
        ["lightning"], ["--devices", "2", "--steps", "5"], [],
        {"bucket_cap_mb": 1.0, "dataloader_workers": 1},
    ),
    "accelerate_fsdp.py": (
        ["accelerate"], ["--steps", "4", "--width", "32"], [], {"gradient_as_bucket_view": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", CASES)
def test_a_script_trains_the_same_tuned_and_untuned(script, tmp_path):
    needs, arguments, options, knobs = CASES[script]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    command = [str(SCRIPTS / script), *arguments]
    plain, _ = run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", *command)
    written = "".join(f"{name}: {str(value).lower()}\n" for name, value in knobs.items())
    (tmp_path / "knobs.yaml").write_text(written)
    start = ["-m", "perfsearch.cli.run", "--nproc-per-node=2", "--knobs", "knobs.yaml", *options]
    tuned, told = run(tmp_path, *start, *command)
    assert losses(plain), plain
    assert losses(tuned) == pytest.approx(losses(plain), rel=1e-3)
    assert "without effect" not in told
    for name in knobs:
        assert re.search(rf"in force: .*{name}", told), told
