"""Heavy and optional packages load only where they are used."""

import importlib.util
import subprocess
import sys

import pytest

HEAVY = {"torch", "mlflow", "sklearn", "nevergrad", "optuna", "rich", "pynvml", "pandas"}

CASES = {
    "perfsearch.cli.search": HEAVY | {"hydra", "omegaconf"},
    "perfsearch.config.schema": HEAVY | {"hydra", "omegaconf", "numpy"},
    "perfsearch.cli.mcp": HEAVY | {"hydra", "omegaconf", "mcp", "pydantic", "anyio"},
    "perfsearch.cli.view": HEAVY | {"hydra", "omegaconf"},
    "perfsearch.api": HEAVY | {"hydra", "omegaconf", "numpy"},
    "perfsearch.progress": HEAVY | {"hydra", "omegaconf"},
    "perfsearch.result": HEAVY | {"hydra", "omegaconf"},
    "perfsearch.pipeline.search": {"torch", "mlflow", "sklearn", "nevergrad", "hydra", "omegaconf"},
    "perfsearch.workers.rank": {"mlflow", "sklearn", "nevergrad", "hydra", "omegaconf", "rich"},
    # The controller asks ranks, and waits for no import of torch.
    "perfsearch.runners.ddp.runner": HEAVY,
    "perfsearch.runners.zero.runner": HEAVY,
    "perfsearch.runners.deepspeed.runner": HEAVY,
    "perfsearch.runners._script.runner": HEAVY,
    "perfsearch.runners.soap.runner": HEAVY | {"numba"},
    # What a script or job sets for torch before it imports it must be heeded.
    "perfsearch.instrument.entry": HEAVY | {"numpy"},
    "perfsearch.runners.deepspeed.rank": HEAVY | {"numpy"},
    "perfsearch.soap.recipe": {"numba", "mlflow", "sklearn", "nevergrad", "optuna"},
    "perfsearch.soap.profile": {"numba", "mlflow", "sklearn", "nevergrad", "optuna"},
}


@pytest.mark.parametrize("module", CASES)
def test_importing_a_module_leaves_heavy_packages_alone(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    code = f"import sys, {module}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert CASES[module] & set(result.stdout.split()) == set()


def test_a_command_that_only_prints_its_help_loads_no_knobs():
    code = "import sys, perfsearch.cli.search, perfsearch.config.schema; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "perfsearch.knobs" not in result.stdout.split()
