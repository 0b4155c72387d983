"""Whether a search loses, mistakes or leaves behind anything when something fails.

    python benchmarks/faults.py run --store STORE.jsonl [--real 60] [--replay 240] [--seed 0]
    python benchmarks/faults.py run --store LANE.jsonl --lane 3/12
    python benchmarks/faults.py report --store STORE.jsonl [STORE.jsonl ...]

``run`` adds what the store lacks, a line a fault, and may be killed at any time; ``--short`` is a
few faults of each group, without a store. Exit code 1: something was wrong. What was wrong leaves
its directory under ``--home``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from _environment import set_environment

if __name__ == "__main__":  # and not in whoever imports it
    set_environment()

import _fault_real
import _fault_replay
from _fault_common import (
    Fault,
    Outcome,
    Server,
    commit,
    free_port,
    fresh_directory,
    machine,
    machines,
    migrated_database,
)

SHORT_REAL = ("grandchild holding a pipe",)
SHORT_REPLAY = ("exception", "SIGKILL of the controller", "torn journal", "port taken", "SIGTERM")
COUNTS = {
    "trials_lost": "trials lost",
    "wrong_status": "wrong status",
    "processes_left": "processes left",
    "not_ended": "searches that did not end",
    "running_runs": "RUNNING runs",
    "other": "anything else (exit codes, MLflow against the journal, another result)",
}


def planned(real: int, replay: int, seed: int) -> list[Fault]:
    """Every kind in turn, in each group."""
    groups = (("real", _fault_real.KINDS, real), ("replay", _fault_replay.KINDS, replay))
    return [
        Fault(group, kinds[index % len(kinds)], index, seed)
        for group, kinds, count in groups
        for index in range(count)
    ]


def lane(text: str) -> slice:
    """``3/12``: the third of twelve shares, which together are all."""
    place, _, of = text.partition("/")
    if not (place.isdecimal() and of.isdecimal() and 1 <= int(place) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}; such as 3/12, the third of twelve")
    return slice(int(place) - 1, None, int(of))


def load(*stores: Path) -> list[Outcome]:
    lines = [line for store in stores if store.exists() for line in store.read_text().splitlines()]
    return [Outcome.from_json(json.loads(line)) for line in lines if line.endswith("}")]


def run(faults: Sequence[Fault], store: Path | None, home: Path) -> list[Outcome]:
    outcomes = load(store) if store is not None else []
    known = {o.fault for o in outcomes}
    left = [fault for fault in faults if fault not in known]
    database = migrated_database(home / "template")
    servers: list[Server] = []

    def server() -> Server:
        if not servers:
            copy = fresh_directory(home / "server", database) / "mlflow.db"
            servers.append(Server(copy, free_port()))
        return servers[0]

    try:
        for place, fault in enumerate(left, start=1):
            if fault.group == "real":
                outcome = _fault_real.run(fault, home, database)
            else:
                _import_everything()
                outcome = _fault_replay.run(fault, home, database, server)
            outcome.machine = machine()
            outcomes.append(outcome)
            if store is not None:
                with store.open("a") as file:
                    file.write(json.dumps(outcome.to_json()) + "\n")
            print(f"{place}/{len(left)} {line_of(outcome)}", flush=True)
    finally:
        for one in servers:
            one.kill()
    return outcomes


def _import_everything() -> None:
    """What a command imports, so that its fork need not."""
    import perfsearch.cli.search
    import perfsearch.pipeline.search
    import perfsearch.tracking.mlflow  # noqa: F401


def line_of(outcome: Outcome) -> str:
    fault = outcome.fault
    verdict = "good"
    if outcome.skipped:
        verdict = f"skipped: {outcome.skipped}"
    elif outcome.findings:
        verdict = f"WRONG: {outcome.findings}"
    elif not outcome.struck:
        verdict = "good, but the fault found nothing to strike"
    codes = " ".join(map(str, outcome.exit_codes))
    return (
        f"{fault.name} {fault.kind} ({outcome.detail}): exit {codes}, "
        f"{outcome.seconds:.1f} s: {verdict}"
    )


def report(outcomes: Sequence[Outcome], commit: str) -> str:
    tried = [o for o in outcomes if not o.skipped and o.struck]
    lines = [
        "# Faults",
        "",
        f"`python benchmarks/faults.py run` at commit {commit}, on {machines(tried)}. "
        "Each fault is one search of its own, started by the command and, where the fault ends it, "
        "started again by the same command.",
        "",
        "- *real*: `runner=ddp`, two gloo processes that train a small model; the fault strikes in "
        "the middle of a training step of a drawn trial (baseline, search, sentinel or "
        "confirmation) on a drawn rank.",
        "- *replay*: `runner=replay`; failures of ranks are answered by the workers' own "
        "classification of the same evidence, everything else is done for real. Searches that were "
        "broken off are also compared with an undisturbed one: same trials, same best.",
        "",
        f"{len(tried)} faults, of which {sum(o.fault.group == 'real' for o in tried)} real; "
        f"{sum(len(o.exit_codes) for o in tried)} commands; "
        f"{sum(o.seconds for o in tried) / 60:.0f} minutes.",
        "",
        "| count | |",
        "|---|---|",
    ]
    for key, label in COUNTS.items():
        lines.append(f"| {label} | {sum(len(o.findings.get(key, [])) for o in tried)} |")
    lines += ["", "| fault | real | replay | exit codes seen |", "|---|---|---|---|"]
    for kind in _fault_real.KINDS:
        of_kind = [o for o in tried if o.fault.kind == kind]
        counts = Counter(o.fault.group for o in of_kind)
        codes = Counter(" then ".join(map(str, o.exit_codes)) for o in of_kind)
        seen = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        lines.append(f"| {kind} | {counts['real']} | {counts['replay']} | {seen} |")
    idle = [o for o in outcomes if o.skipped or not o.struck]
    if idle:
        lines += ["", "Not counted above:", ""]
        lines += [f"- {line_of(o)}" for o in idle]
    wrong = [o for o in tried if o.findings]
    if wrong:
        lines += ["", "What was wrong:", ""]
        lines += [f"- {line_of(o)}" for o in wrong]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--store", type=Path)
    running.add_argument("--real", type=int, default=60)
    running.add_argument("--replay", type=int, default=240)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument(
        "--lane", type=lane, default=slice(None), help="such as 3/12: this share of the faults"
    )
    running.add_argument("--home", type=Path, help="where searches run; a temporary directory")
    running.add_argument("--short", action="store_true", help="a few faults of each group")
    reporting = commands.add_parser("report")
    reporting.add_argument("--store", type=Path, nargs="+", required=True)
    reporting.add_argument("--commit", help="at which the store was made; the present one")
    options = parser.parse_args(arguments)
    if options.command == "report":
        print(report(load(*options.store), options.commit or commit()), end="")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # servers are ended too
    if options.short:
        faults = [Fault("real", kind, i, options.seed) for i, kind in enumerate(SHORT_REAL)]
        faults += [Fault("replay", kind, i, options.seed) for i, kind in enumerate(SHORT_REPLAY)]
    else:
        faults = planned(options.real, options.replay, options.seed)[options.lane]
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        home = (options.home or Path(temporary)).absolute()
        outcomes = run(faults, options.store, home)
    print("\n" + report(outcomes, commit()), end="")
    return int(any(o.findings for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
