"""A runner, a strategy and a pipeline that start nothing, for tests of the command.

``install`` puts them into the registries; ``python front_fakes.py ARGUMENTS`` is the command with
them in place, for tests that need a process of their own.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsearch.config.options import ConfigError
from perfsearch.core import registry
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.narrow import narrow
from perfsearch.core.option import option
from perfsearch.core.space import Space
from perfsearch.pipeline import search as pipeline
from perfsearch.pipeline.session import Result
from perfsearch.runners.base import OwnModes, Runner
from perfsearch.strategies.base import Strategy

CONF = Path(__file__).parents[1] / "data" / "front_conf"
PREFIX = ["--config-dir", str(CONF), "runner=fake", "strategy=fake"]

KNOBS = [
    Knob("bucket_cap_mb", Kind.REAL, 25, low=1, high=512, log=True),
    Knob("static_graph", Kind.BOOLEAN, False),
    Knob("optimizer_implementation", Kind.CATEGORICAL, "default", ("default", "foreach", "fused")),
]


class FakeRunner(Runner, OwnModes):
    own_modes = ("profile",)

    @dataclass(frozen=True)
    class Options:
        knobs: dict[str, Any] = field(default_factory=dict)
        devices: int = option(2, low=1)

    def __init__(self, options, environment):
        super().__init__(options, environment)
        nproc = environment.nproc
        if nproc is not None and nproc > options.devices:
            raise ConfigError("nproc", f"nproc={nproc}: only {options.devices} GPUs are visible.")
        searched, self.pinned = narrow(KNOBS, options.knobs, environment.numerics)
        self.space = Space(searched)
        self.baseline = {k.name: k.default for k in searched}

    def measure(self, configuration, plan):
        raise AssertionError("the fake pipeline measures nothing")

    def export(self, configuration, directory):
        raise AssertionError("the fake pipeline hands nothing over")

    def profile(self, settings, note):
        note("profiled")
        return 0


class FakeStrategy(Strategy):
    @dataclass(frozen=True)
    class Options:
        jitter: float = option(0.1, low=0.0, high=1.0)

    def ask(self):
        return None

    def tell(self, trial):
        pass


calls = []
"""(settings, runner, strategy) of each search that the pipeline was asked for."""


def search(settings, runner, strategy_factory, view):
    strategy = strategy_factory(runner.space, runner.hints([]))
    calls.append((settings, runner, strategy))
    view.stage("search", f"seed {settings.seed}")
    experiment = settings.tracking.experiment
    if experiment == "bug":
        raise ValueError("a bug of ours")
    if experiment == "refused":
        raise ConfigError("resume", "resume=auto: the recorded search ran on another model.")
    if experiment.startswith("wait"):
        _wait_for_a_signal(forever=experiment == "wait-forever")
    code = int(experiment.removeprefix("exit-")) if experiment.startswith("exit-") else 0
    return Result(code, Path("run"), [])


def _wait_for_a_signal(forever):
    try:
        print("waiting", flush=True)
        time.sleep(30)
    finally:
        print("cleaning", flush=True)
        end = time.monotonic() + (30 if forever else 1.5)
        while time.monotonic() < end:
            time.sleep(0.05)
        print("cleaned", flush=True)


def install(set_attribute=setattr):
    """Register the fakes beside what is there; ``set_attribute`` may be monkeypatch's."""
    names, load, fakes = registry.names, registry.load, (FakeRunner, FakeStrategy)

    def load_one(package, key, name, kind):
        if name == "fake":
            return next(fake for fake in fakes if issubclass(fake, kind))
        return load(package, key, name, kind)

    set_attribute(registry, "names", lambda package: sorted([*names(package), "fake"]))
    set_attribute(registry, "load", load_one)
    set_attribute(pipeline, "search", search)


def refused(result, *words):
    """Check that the command said one thing, with these words, and started nothing."""
    code, out, err = result
    assert code == 2
    assert err.startswith("perfsearch: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err + out
    for word in words:
        assert word in err
    assert calls == []


if __name__ == "__main__":
    from perfsearch.cli.search import main

    install()
    assert "HYDRA_FULL_ERROR" not in os.environ
    sys.exit(main())
