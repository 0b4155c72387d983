"""The side process that the deciding rank asks: strategies and their packages load here only.

It reads a JSON object a line from its standard input and answers on its standard output; the end
of the input ends it, so that it never outlives the rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Value, same_value
from perfsearch.core.python import module_command
from perfsearch.core.space import Space
from perfsearch.core.trial import Trial
from perfsearch.online.controller import ProposerEndedError
from perfsearch.online.knobs import make_space
from perfsearch.online.options import AutotuneOptions
from perfsearch.strategies.base import Strategy

_TRY_ALL = 8
_LOW_PRIORITY = 10


class Proposer:
    """Answers what to try next.

    Args:
        facts: what the ranks found; see ``make_space``. Beside that ``earlier``, configurations of
            an earlier run.
        options: what the user asked for.

    Raises:
        BadInputError: the user's setting of a knob cannot be honoured.

    """

    def __init__(self, facts: Mapping[str, Any], options: AutotuneOptions) -> None:
        self.space, self.pinned, self.left_out = make_space(facts, options)
        present: Mapping[str, Value] = facts["configuration"]
        self.baseline = {knob.name: present[knob.name] for knob in self.space.knobs}
        self._earlier = [self._fits(c, present) for c in facts.get("earlier", ())]
        self._strategy = _choose(self.space, self.baseline, options)

    def describe(self) -> dict[str, Any]:
        """What is tuned and what is not."""
        return {
            "searched": [knob.name for knob in self.space.knobs],
            "pinned": self.pinned,
            "left_out": self.left_out,
            "size": self.space.size,
            "earlier": self._earlier,
        }

    def _fits(self, configuration: Mapping[str, Value], present: Mapping[str, Value]) -> bool:
        """Whether a whole configuration has every fixed value, and else only what is allowed."""
        fixed = {**present, **self.pinned}
        if configuration.keys() != fixed.keys():
            return False
        for name, value in configuration.items():
            knob = self.space.by_name.get(name)
            choices = [fixed[name]] if knob is None else knob.values
            known = any(_alike(value, choice) for choice in choices)
            if not known and not (knob is not None and knob.is_range and knob.contains(value)):
                return False
        return True

    def tell(self, trial: Trial) -> None:
        """Take note of a trial; fixed knobs among its values are left out."""
        values = {n: v for n, v in trial.configuration.items() if n in self.space.by_name}
        trial.configuration = values
        self._strategy.tell(trial)

    def ask(self) -> dict[str, Any]:
        """The whole configuration to try next, ``None`` with the reason when it is done."""
        point = self._strategy.ask() if self.space.knobs else None
        if point is None:
            reason = self._strategy.stop_reason or "there is nothing to tune"
            return {"configuration": None, "reason": reason}
        return {"configuration": {**self.pinned, **point}, "reason": ""}


def _alike(one: Value, other: Value) -> bool:
    """Whether they are the same, sizes but for their whole number of bytes."""
    if isinstance(one, float) and isinstance(other, int | float) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=1e-3)
    return same_value(one, other)


def _choose(space: Space, baseline: dict[str, Value], options: AutotuneOptions) -> Strategy:
    from perfsearch.strategies.bayes import Bayes
    from perfsearch.strategies.grid import Grid

    hints = Hints(baseline=baseline, effect_order=tuple(knob.name for knob in space.knobs))
    size = space.size
    if size is not None and size <= _TRY_ALL:
        return Grid(space, hints, options.seed)
    chosen = Bayes.Options(alpha=options.gaussian_process_noise, min_gain=options.min_gain)
    return Bayes(space, hints, options.seed, chosen)


class Service:
    """Reads requests and answers those that have an answer."""

    def __init__(self) -> None:
        self._proposer: Proposer | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; ``None`` where there is none."""
        if request["do"] == "open":
            try:
                options = AutotuneOptions.from_mapping(request["options"])
                self._proposer = Proposer(request["facts"], options)
            except BadInputError as error:
                return {"refused": str(error)}
            return self._proposer.describe()
        assert self._proposer is not None
        if request["do"] == "tell":
            self._proposer.tell(Trial.from_json(request["trial"]))
            return None
        return self._proposer.ask()

    def serve(self, requests: IO[str], answers: IO[str]) -> None:
        """Answer until the requests end."""
        for line in requests:
            answer = self.answer(json.loads(line))
            if answer is not None:
                print(json.dumps(answer), file=answers, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve on the standard streams."""
    answers = os.fdopen(os.dup(1), "w")
    os.nice(_LOW_PRIORITY)  # training goes first, wherever there are too few cores
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    Service().serve(sys.stdin, answers)
    return 0


# -----------------------------------------------------------------------------
# The deciding rank's end of the side process that holds the strategy.

_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
_EXIT_S = 5.0


class ProposerProcess:
    """Starts the process at once, so that its imports are done when the first answer is needed."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_JOB}
        environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        self._process = subprocess.Popen(
            module_command("perfsearch.online.proposer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is the job's to handle
        )
        self._read = b""

    def open(self, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Say what there is to tune; it is answered."""
        self._send({"do": "open", "facts": dict(facts), "options": dict(options)})

    def tell(self, trial: Trial) -> None:
        """Pass on a trial."""
        self._send({"do": "tell", "trial": trial.to_json()})

    def ask(self) -> None:
        """Ask what to try next; it is answered."""
        self._send({"do": "ask"})

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The next answer, ``None`` where it does not come in time.

        Raises:
            ProposerEndedError: it will never come.

        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while b"\n" not in self._read:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                raise self._ended()
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> ProposerEndedError:
        code = self._process.wait()
        return ProposerEndedError(
            f"the process that proposes configurations ended (exit code {code}); "
            "its error stands above"
        )

    def close(self) -> None:
        """End it at once: it has nothing to lose, and training waits.

        The end of its input would end it too, but loader processes may hold that open.
        """
        self._process.terminate()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
