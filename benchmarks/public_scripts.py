"""What each command does with training scripts of other people, which know nothing of it.

    pip install -r benchmarks/public_scripts_requirements.txt     # in an environment of its own
    python benchmarks/public_scripts.py run --store DIR           # all, an hour on two cores
    python benchmarks/public_scripts.py run --store DIR --scripts mnist vae --modes plain search
    python benchmarks/public_scripts.py run --store DIR --sources CLONES   # without a network
    python benchmarks/public_scripts.py report --store DIR > benchmarks/results/public_scripts.md

A script is brought by repository and commit, gets small data that are made on the spot, and is
started in a fresh copy of its repository for each mode:

- ``plain``: as its authors start it, by python or torchrun;
- ``clock``: the same, with torch's own hook noting when the optimizer steps; ``clock-again``: once
  more after the search, so that work of others that comes or goes is no difference of the clocks;
- ``run``: by perfsearch-run without an option;
- ``profile``, ``search``, ``autotune``: with that option;
- ``knobs``: with what the search has found; ``handover``: by the command that the search wrote,
  where perfsearch cannot be imported.

A mode is right where it ended as the plain start did, with the same files, or told in a true line
why it cannot be done; a search and a profile leave the files as they were; a rate that is told is
that of the clock. Finished modes are not run again: remove their line from DIR/records.jsonl.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from _public_cases import CASES
from _public_modes import MODES, Bench
from _public_report import of_case, report
from _store import Store


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--scripts", nargs="*", default=[], help="their names; all by default")
    parser.add_argument("--store", type=Path, required=True, help="folder for sources and records")
    parser.add_argument("--sources", type=Path, help="folder of clones OWNER+NAME, not fetched")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=40.0, help="of a search, at most")
    parser.add_argument("--trials", type=int, default=6, help="of a search, at most")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one mode")
    return parser.parse_args()


def main() -> int:
    options = options_of()
    store = Store(options.store / "records.jsonl")
    if options.what == "report":
        print(report(store.records))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, too
    unknown = set(options.scripts) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no such script: {', '.join(sorted(unknown))}")
    for case in CASES:
        if options.scripts and case.name not in options.scripts:
            continue
        bench = Bench(case, options)
        for mode in options.modes:
            if store.has(mode, case.name) or not bench.can(mode):
                continue
            record = bench.run(mode)
            store.add(mode, case.name, **record)
            judged = dict(of_case(case, store.records))[mode]
            print(f"{case.name} {mode}: {judged} ({record['seconds']:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
