"""DeepSpeed's own autotuner in its fast mode, and what its choice really gives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from perfsearch.config.schema import validate
from perfsearch.core.trial import Purpose
from perfsearch.runners.base import Plan
from perfsearch.runners.deepspeed.runner import DeepSpeed

SCRIPT = Path(__file__).with_name("_deepspeed_train.py")

_PROGRAMS = {
    "deepspeed": f'#!/bin/sh\nexec "{sys.executable}" -m deepspeed.launcher.runner "$@"\n',
    # its clean-up calls this on one node, too, and ends without it; there is nothing to clean up
    "pdsh": "#!/bin/sh\nexit 0\n",
}

_MODULES = {
    # for its closing table only
    "tabulate": "def tabulate(rows, headers=(), **options):\n"
    "    return '\\n'.join('  '.join(map(str, row)) for row in [headers, *rows])\n",
    # where it can be imported the tuner insists on a run of it
    "mlflow": "raise ImportError('not here')\n",
}


def configuration(on_gpu: bool) -> dict[str, Any]:
    """What its user would write to have all stages tuned."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": "all"},
        "zero_allow_untested_optimizer": True,
        "autotuning": {"enabled": True, "fast": True},
    }
    if on_gpu:
        made["fp16"] = {"enabled": True, "initial_scale_power": 12}
    return made


@contextmanager
def environment(wheels: Path | None, directory: Path, ranks: int, on_gpu: bool) -> Iterator[None]:
    """Programs and packages that it needs, in the variables of this process for a while."""
    before = dict(os.environ)
    programs, packages = directory / "bin", directory / "packages"
    programs.mkdir()
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    packages.mkdir()
    for name, text in _MODULES.items():
        (packages / f"{name}.py").write_text(text)
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    paths = [str(packages), str(Path(__file__).parents[1])]
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited = [p for p in [os.environ.get("PYTHONPATH")] if p]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *inherited])
    os.environ["DS_BUILD_OPS"] = "0"
    os.environ["PYTHONWARNINGS"] = "ignore"  # it takes a warning that says "error" for one
    if not on_gpu:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(ranks), OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tune(size: str, ranks: int, on_gpu: bool, directory: Path, limit_s: float) -> dict[str, Any]:
    """Run it, and gather what it left.

    Args:
        size: of GPT-2.
        ranks: GPUs.
        on_gpu: whether there are any.
        directory: where it runs.
        limit_s: seconds after which it is ended; what it has found until then is still gathered.

    """
    (directory / "ds_config.json").write_text(json.dumps(configuration(on_gpu), indent=2))
    command = ["deepspeed", "--autotuning", "tune", f"--num_gpus={ranks}"]
    command += [str(SCRIPT), "--size", size, "--deepspeed_config", "ds_config.json"]
    begin = time.monotonic()
    with (directory / "tuner.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=directory, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        shown = ""
        while process.poll() is None and time.monotonic() - begin < limit_s:
            time.sleep(0.5)
            done = ", ".join(sorted(p.parent.name for p in _metrics(directory)))
            if done != shown:
                shown = done
                print(f"  {time.monotonic() - begin:5.0f} s: {done}", flush=True)
        finished = process.poll() is not None
        if not finished:
            _end(process)
    results = directory / "autotuning_results"
    optimal = results / "ds_config_optimal.json"
    tail = (directory / "tuner.log").read_text()[-2000:]
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "finished": finished,
        "exit_code": process.returncode,
        "experiments": len(list(results.glob("*/exp.json"))),
        "readings": {p.parent.name: _throughput(p) for p in _metrics(directory)},
        "chosen": json.loads(optimal.read_text()) if optimal.exists() else None,
        "log": "" if optimal.exists() else tail,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with everything that it has started, each in a session of its own."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *started]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(started, timeout=10)


def _metrics(directory: Path) -> list[Path]:
    return sorted((directory / "autotuning_results").glob("*/metrics.json"))


def _throughput(path: Path) -> float | None:
    try:
        found = json.loads(path.read_text()).get("throughput")
    except ValueError:  # still being written
        return None
    return None if found is None else round(float(found), 2)


def measured(chosen: Mapping[str, Any], size: str, ranks: int, directory: Path) -> dict[str, Any]:
    """What a configuration really gives, steps timed whole and from outside."""
    file = directory / "chosen.json"
    file.write_text(json.dumps(chosen))
    command = ["deepspeed", f"--num_gpus={ranks}", str(SCRIPT), "--size", size]
    settings = validate(
        {
            "runner": {"name": "deepspeed"},
            "strategy": {"name": "auto"},
            "workload": {"name": "script",
                         "command": [*command, "--deepspeed_config", str(file)]},
            "run_dir": str(directory / "run"),
            "limits": {"startup_s": 120},
        }
    )  # fmt: skip
    runner = DeepSpeed.from_settings(settings)
    with tempfile.TemporaryDirectory() as logs:
        plan = Plan(0, Purpose.BASELINE, time_limit_s=90.0, log_directory=Path(logs))
        begin = time.monotonic()
        try:
            runner.open(directory / "run")
            outcome = runner.measure(runner.baseline, plan)
        finally:
            runner.close()
    found = outcome.measurement
    return {
        "status": str(outcome.status),
        "reason": outcome.reason,
        "seconds": round(time.monotonic() - begin, 1),
        "samples_per_s": None if found is None else round(found.samples_per_s, 2),
        "samples_per_step": None if found is None else found.samples_per_step,
        "peak_allocated_gib": None if found is None else found.peak_allocated_gib,
        "gpu": runner.hardware.device_name,
    }
