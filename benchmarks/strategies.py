"""How many trials each strategy and each peer needs, on surfaces whose truth is known.

    python benchmarks/strategies.py run --store STORE.jsonl [--surfaces A,B] [--contenders X,Y]
    python benchmarks/strategies.py report --store STORE.jsonl > TABLES.md

``run`` adds what the store lacks, a line a surface, contender and seed, and may be killed at any
time. Every contender is told the baseline as trial 0 and hands over the configuration with the
best observation; regret is taken from its true value. A contender whose name ends in
``_unhinted`` is an own strategy that is told nothing but the baseline, as peers are. On surfaces
with prices (``NAME_priced``), one whose name ends in ``_unpriced`` is not told how many seconds a
trial took; both have 400 s of trials.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from _environment import set_environment

if __name__ == "__main__":  # and not in whoever imports it
    set_environment()

from _races import race, read

CONTENDERS = (
    "bayes",
    "bayes_unhinted",
    "fast",
    "mcmc",
    "random",
    "optuna_tpe",
    "optuna_tpe_paid",
    "ds_model",
    "ds_grid",
    "horovod",
    "optuna",
    "nevergrad",
    "optuna_gp",
    "ng_TwoPointsDE",
    "ng_PortfolioDiscreteOnePlusOne",
    "ng_NGOpt",
)
"""``auto`` is not among them: on spaces of this size, without predicted costs, it is ``bayes``."""

SEEDS = {
    "optuna_gp": 10,
    "nevergrad": 10,
    "ng_TwoPointsDE": 10,
    "ng_PortfolioDiscreteOnePlusOne": 10,
    "ng_NGOpt": 10,
}
"""Contenders with fewer than 30 seeds, as a race of theirs takes long."""


def run(
    store: Path, surfaces: Sequence[str], contenders: Sequence[str], seeds: int, processes: int
) -> None:
    """Add what the store lacks."""
    done = {(r.surface, r.contender, r.seed) for r in read(store)}
    jobs = [
        (surface, name, seed)
        for name in contenders
        for surface in surfaces
        for seed in range(min(seeds, SEEDS.get(name, seeds)))
        if (surface, name, seed) not in done
    ]
    with ProcessPoolExecutor(processes) as pool, store.open("a") as out:
        for future in as_completed([pool.submit(race, *job) for job in jobs]):
            out.write(json.dumps(asdict(future.result())) + "\n")
            out.flush()


def main() -> None:
    """Read the command line."""
    from _surfaces import PRICED, surfaces

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    without = [name for name in surfaces() if not name.endswith(PRICED)]
    parser.add_argument("mode", choices=["run", "report"])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--surfaces", default=",".join(without))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if given.mode == "report":
        from _strategies_report import report

        print(report(read(given.store)))
        return
    run(
        given.store,
        given.surfaces.split(","),
        given.contenders.split(","),
        given.seeds,
        given.processes,
    )


if __name__ == "__main__":
    main()
