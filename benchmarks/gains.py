"""What a search with its defaults finds on scripts as people have them, and what there is to find.

    python benchmarks/gains.py resnet50 gpt bert_uneven llama --out gains.jsonl
    python benchmarks/gains.py resnet50 --grid-only --out gains.jsonl
    python benchmarks/gains.py resnet50 --search-only --out gains.jsonl
    python benchmarks/gains.py report --out gains.jsonl
    python benchmarks/gains.py gpt llama --small --device cpu      # tries it out

For each script of ``benchmarks/scripts``, none of which knows perfsearch:

- ``grid``: it is started with each set of options that an expert would try by hand, as it is at
  first and once more at last, and the throughput is read that it prints by its own clock.
- ``search``: ``perfsearch-run --search`` on the bare script, within the seconds that are given.
- ``hand-over``: ``best/apply/run.sh`` and the bare script in turn, where perfsearch cannot be
  imported; left out where the search has no gain, as both are the same then.

What is printed is also a line of ``--out``, as soon as it is known. Whatever is started is ended at
its time. Needs torchvision for ``resnet50``, and transformers and accelerate for ``bert_uneven``
and ``llama``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _gain_cases import CASES, Case
from _gain_report import report
from _handed_over import ENDLESS, shortened, without_perfsearch
from _searched import found_in, key_words
from _store import Store
from _watched import Ended, watched

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from perfsearch.tracking.export import provenance  # noqa: E402

RATE = re.compile(r"^throughput: ([\d.]+) samples/s over the last (\d+) steps$")
AS_IT_IS = ""
"""The options of the baseline."""
SMALL_STEPS = 6
KEPT_LINES = 80


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("scripts", nargs="+", choices=(*names, "report"))
    parser.add_argument("--out", type=Path, default=Path("gains.jsonl"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, and nothing compiled")
    parser.add_argument("--seconds", type=float, default=200.0, help="budget.seconds")
    parser.add_argument("--confirm-seconds", type=float, default=120.0, help="confirm.seconds")
    parser.add_argument(
        "--search-words", default="", metavar="WORDS",
        help="more for perfsearch-run, such as '-o runner.knobs.compile_mode=search'",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="of a start that is not searched")
    parser.add_argument(
        "--leave-out", nargs="*", default=[], metavar="TEXT", help="of the grid what has this in it"
    )
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of such a start")
    parser.add_argument("--reruns", type=int, default=2, help="of the hand-over and the baseline")
    parser.add_argument("--keep", type=Path, help="folder for logs and searches; else they go")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--grid-only", action="store_true")
    only.add_argument("--search-only", action="store_true", help="with its hand-over")
    return parser.parse_args()


class Bench:
    """One script: its grid, its search, and what the search hands over.

    Args:
        case: the script.
        options: of the command line.
        home: an empty folder.
        store: takes what is found.

    """

    def __init__(self, case: Case, options: argparse.Namespace, home: Path, store: Store) -> None:
        self.case, self.options, self.home, self.store = case, options, home, store
        self.run_dir, self.work = home / "search", home / "work"
        self.work.mkdir(parents=True)
        self.steps = options.steps or (SMALL_STEPS if options.small else case.steps)
        environment = dict(os.environ)
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        path = [str(_package(home / "package")), environment.get("PYTHONPATH", "")]
        self.searching = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self.alone = without_perfsearch(home / "alone", environment)

    def grid(self) -> None:
        """Start the script with each set of options, as it is at first and at last."""
        left_out = self.options.leave_out
        tried = [
            (options, altering)
            for options, altering in self.case.grid(self.options.small)
            if not any(text in options for text in left_out)
        ]
        for options, altering in [(AS_IT_IS, False), *tried, (AS_IT_IS, False)]:
            self._plain("grid", options, altering=altering)

    def search(self) -> bool:
        """Search the bare script; return whether a gain is handed over."""
        keys = {
            "budget.seconds": self.options.seconds,
            "confirm.seconds": self.options.confirm_seconds,
            "run_dir": self.run_dir,
            "tracking.enabled": "false",
        }
        words = [*key_words(keys), *shlex.split(self.options.search_words)]
        command = [sys.executable, "-m", "perfsearch.cli.run", "--search", *words]
        limit_s = self.options.seconds + self.options.confirm_seconds + 120
        ended = self._started([*command, *self._script(ENDLESS)], self.searching, "search", limit_s)
        found = found_in(self.run_dir)
        self._note(
            "search", rc=ended.rc, seconds=round(ended.seconds, 1), left=ended.left,
            words=self.options.search_words, lines=ended.lines[-KEPT_LINES:], **found,
        )  # fmt: skip
        summary = found.get("summary")
        return ended.rc == 0 and summary is not None and not summary["is_baseline"]

    def hand_over(self) -> None:
        """What was handed over and the script as it is, in turn, so that a drift meets both."""
        for _ in range(self.options.reruns):
            command = ["sh", str(shortened(self.run_dir, self.steps))]
            ended = self._started(command, self.alone, "handed-over", self.options.limit)
            self._note("hand-over", arm="handed over", **_outcome(ended))
            self._plain("hand-over", AS_IT_IS, arm="baseline")

    def _plain(self, part: str, options: str, **more: Any) -> None:
        command = [sys.executable, *self._script(self.steps, options)]
        ended = self._started(command, self.alone, "plain", self.options.limit)
        self._note(part, options=options, **more, **_outcome(ended))

    def _script(self, steps: int | str, more: str = "") -> list[str]:
        on_gpu = self.options.device == "cuda"
        return self.case.script(steps, self.options.small, on_gpu, more)

    def _started(
        self, command: list[str], environment: Mapping[str, str], log: str, limit_s: float
    ) -> Ended:
        file = self.home / f"{len(self.store.records):04d}-{log}.log"
        return watched(command, self.work, environment, file, limit_s)

    def _note(self, part: str, **values: Any) -> None:
        self.store.add(part, self.case.name, unix_s=round(time.time()), **values)
        print(f"{self.case.name} {part}: {shown(part, values)}", flush=True)


def _package(directory: Path) -> Path:
    """Where perfsearch can be imported whether or not it is installed, its option files too."""
    package = directory / "perfsearch"
    package.mkdir(parents=True)
    for file in [*(ROOT / "perfsearch").iterdir(), ROOT / "conf"]:
        (package / file.name).symlink_to(file)
    return directory


def _outcome(ended: Ended) -> dict[str, Any]:
    """The rate that a start has printed; its last lines where it has not."""
    rates = [match for line in ended.lines if (match := RATE.match(line))]
    found: dict[str, Any] = {"rc": ended.rc, "seconds": round(ended.seconds, 1), "rate": None}
    if ended.rc == 0 and len(rates) == 1:
        return {**found, "rate": float(rates[0][1]), "timed_steps": int(rates[0][2])}
    return {**found, "lines": ended.lines[-15:]}


def shown(part: str, values: Mapping[str, Any]) -> str:
    """One result for people."""
    took = f"({values['seconds']:.0f} s)"
    ended = "at its time limit" if values["rc"] is None else f"with exit code {values['rc']}"
    if part == "search":
        statuses = [trial["status"] for trial in values.get("trials", [])]
        verdict = values.get("summary", {}).get("verdict") or (values["lines"] or ["nothing"])[-1]
        return f"ended {ended}: {verdict}; {len(statuses)} trials: {', '.join(statuses)} {took}"
    who = values.get("arm") or values["options"] or "as it is"
    if values["rate"] is None:
        last = values["lines"][-1] if values["lines"] else "nothing was printed"
        return f"{who}: no rate, ended {ended}: {last} {took}"
    return f"{who}: {values['rate']:.1f} samples/s {took}"


def _about() -> dict[str, Any]:
    """On what it is measured, and what is measured."""
    found = provenance(ROOT)
    devices = [device["name"] for device in found["devices"]]
    code, torch = found.get("code", {}), found["versions"]["torch"]
    return {"date": time.strftime("%Y-%m-%d"), "devices": devices, "torch": torch, **code}


def main() -> int:
    options = options_of()
    store = Store(options.out)
    if options.scripts == ["report"]:
        print(report(store.records))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, too
    begun = len(store.records)
    store.add("about", "", **_about())
    with tempfile.TemporaryDirectory(prefix="gains-", ignore_cleanup_errors=True) as temporary:
        kept = (options.keep or Path(temporary)).absolute()
        for case in CASES:
            if case.name not in options.scripts:
                continue
            bench = Bench(case, options, kept / f"{case.name}-{time.time():.0f}", store)
            if not options.search_only:
                bench.grid()
            if not options.grid_only and bench.search():
                bench.hand_over()
    seconds = sum(record.get("seconds", 0.0) for record in store.records[begun:])
    print(f"{seconds / 60:.1f} minutes of {'GPU' if options.device == 'cuda' else 'CPU'} time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
