"""The environment of benchmarks whose processes are many: one thread each, and no server."""

import os


def set_environment() -> None:
    """Set it in this process and in what it starts; before anything that reads it is imported."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
