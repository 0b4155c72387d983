"""Proposals of anyone's program or function, asked one question at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import shlex
import shutil
import subprocess
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import json_text
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Value
from perfsearch.core.option import option
from perfsearch.core.proposed import OutsideError, own_values
from perfsearch.core.registry import imported
from perfsearch.core.space import Space, key_of
from perfsearch.core.trial import Measurement, Purpose, Trial, in_one_line
from perfsearch.metrics import advice
from perfsearch.metrics.bounds import affected_parts, upper_bounds
from perfsearch.strategies._candidates import causes_in, feasible_starts
from perfsearch.strategies._history import EXHAUSTED, History
from perfsearch.strategies.base import LOG, Strategy, StrategyError, Surroundings

PROTOCOL = 1
"""Version of the questions, in each of them."""

_REFERENCE = re.compile(r"[\w.]+:[\w.<>]+")
"""How ``MODULE:FUNCTION`` looks, also of a function that cannot be imported."""

_CANDIDATES = 10
"""Configurations that a question suggests."""

_LONGEST = 1 << 20
"""Bytes of an answer, or of what nobody asked for, after which it counts as a flood."""

_SHOWN = 300
"""Characters of a foreign text in a message for people."""

_WAITS_S = 0.2

_EXIT_S = 2.0
"""How long a program may take to end by itself once its input has ended."""

_FORMS = 'Allowed: {"configuration": {KNOB: VALUE, ...}} or {"stop": "REASON"}'

Function = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Takes a question and returns the answer; ``None`` stops the search."""


class External(Strategy):
    """A program or a function of your own proposes; docs/external.md has the protocol.

    Each question has all that there is to know, so that it needs no memory of its own: the knobs
    and their meaning, every trial and how it ended, what holds the job back and the most that each
    part of a step can give, what is left of the budget, and some untried configurations. From
    Python, ``perfsearch.search(..., strategy=my_function)`` is the same.
    """

    sees_all_knobs: ClassVar = True

    @dataclass(frozen=True)
    class Options:
        """Options of ``strategy=external``.

        Attributes:
            command: the program and its arguments, as one text or as a list; or
                ``MODULE:FUNCTION`` of Python, importable from the current directory.
            answer_s: seconds that it has for an answer.
            retries: how often it is asked again, in a row, after an answer that cannot be used.

        """

        command: str | tuple[str, ...]
        answer_s: float = option(60.0, above=0)
        retries: int = option(3, low=0)

        def __post_init__(self) -> None:
            if self.names_function:
                return
            try:
                words = self.words
            except ValueError as error:
                raise ValueError(f"strategy.command={self.command}: {error}") from error
            if not words or shutil.which(words[0]) is None:
                raise ValueError(
                    f"strategy.command={self.shown}: there is no such program that can be started. "
                    "Give one with its arguments, as in strategy.command='python propose.py', or "
                    "MODULE:FUNCTION of Python."
                )

        @property
        def names_function(self) -> bool:
            """Whether ``command`` is a function of Python."""
            return isinstance(self.command, str) and bool(_REFERENCE.fullmatch(self.command))

        @property
        def words(self) -> list[str]:
            """The program and its arguments."""
            given = self.command
            return shlex.split(given) if isinstance(given, str) else list(given)

        @property
        def shown(self) -> str:
            """``command`` for people."""
            given = self.command
            return _short(given if isinstance(given, str) else shlex.join(given))

    def __init__(
        self,
        space: Space,
        hints: Hints,
        seed: int,
        options: Any = None,
        function: Function | None = None,
    ) -> None:
        super().__init__(space, hints, seed, options)
        self._history = History(space, seed)
        self._surroundings: Surroundings | None = None
        self._proposer: _Proposer | None = None
        self._function = function
        if function is None and self.options.names_function:
            self._function = _function_of(self.options.command)
        self._space_told = _space_told(space, hints)

    def open(self, surroundings: Surroundings) -> None:
        """Take note of the search's surroundings; the program is started when it is needed."""
        self._surroundings = surroundings

    def close(self) -> None:
        """End the program, and all that it has started."""
        proposer, self._proposer = self._proposer, None
        if proposer is not None:
            proposer.close()
        if self._surroundings is not None:
            self._surroundings.processes.end()

    def ask(self) -> dict[str, Value] | None:
        """Return what it proposes, ``None`` where it stops or nothing is left.

        Raises:
            StrategyError: it ended, did not answer in time, flooded its pipe, or gave no answer
                that can be used.

        """
        if self._history.is_exhausted():
            self.stop_reason = EXHAUSTED
            return None
        error = ""
        try:
            for _ in range(self.options.retries + 1):
                try:
                    point = self._answer(error)
                except _BadAnswerError as bad:
                    error = str(bad)
                    continue
                return None if point is None else self._history.propose(point)
        except _FailedError as failed:
            raise self._ended(str(failed)) from failed
        raise self._ended(
            f"{self.options.retries + 1} answers in a row that cannot be used "
            f"(strategy.retries={self.options.retries}); the last: {_short(error)}"
        )

    def ask_again(self, proposed: Mapping[str, Value] | None) -> dict[str, Value] | None:
        """Only take note of it: the program is told of its trial, and need not be asked."""
        return None if proposed is None else self._history.propose(proposed)

    def tell(self, trial: Trial) -> None:
        """Note what came of a trial, for the next question."""
        self._history.tell(trial)

    def describe(self) -> str:
        """One line for people."""
        return f"{self.options.shown} proposes, within {self.options.answer_s:g} s each time"

    def _answer(self, error: str) -> dict[str, Value] | None:
        """Ask once, and return what may be tried.

        Raises:
            _BadAnswerError: the answer cannot be used.
            _FailedError: there will be none.

        """
        left = self._budget()
        limit_s, seconds = self.options.answer_s, left["seconds"]
        question = json_text(self._question(error, left)).encode()
        if self._proposer is None:
            self._proposer = self._started()
        try:
            line = self._proposer.answer(
                question, limit_s if seconds is None else min(limit_s, seconds)
            )
        except _LateError as late:
            if seconds is None or seconds >= limit_s:
                raise _FailedError(
                    f"no answer within strategy.answer_s={limit_s:g} s; give it more, or mend it"
                ) from late
            self.stop_reason = "the budget's time was over before the proposer answered"
            return None
        answer = _parsed(line)
        if "configuration" in answer:
            return self._checked(answer["configuration"])
        reason = _short(answer["stop"])
        self.stop_reason = f"the proposer stopped: {reason}" if reason else "the proposer stopped"
        return None

    def _budget(self) -> Mapping[str, float | None]:
        if self._surroundings is None:
            return {"trials": None, "seconds": None}
        return self._surroundings.budget_left()

    def _started(self) -> _Proposer:
        if self._function is not None:
            return _InProcess(self._function, self._log())
        surroundings = self._surroundings
        variables = dict(
            os.environ if surroundings is None else surroundings.processes.environment()
        )
        return _Program(self.options.words, variables, self._log())

    def _log(self) -> Path | None:
        return None if self._surroundings is None else self._surroundings.run_dir / LOG

    def _ended(self, why: str) -> StrategyError:
        """End it at once, and say in one line for people why."""
        if self._proposer is not None:
            self._proposer.kill()
        self.close()
        log = self._log()
        where = ""
        if log is not None and log.exists() and log.stat().st_size:
            where = f". What it wrote to its standard error: {log}"
        return StrategyError(in_one_line(f"strategy.command={self.options.shown}: {why}{where}"))

    # -------------------------------------------------------------------------
    # A question.

    def _question(self, error: str, left: Mapping[str, float | None]) -> dict[str, Any]:
        trials = self._history.trials
        baseline = next((t for t in trials if t.purpose is Purpose.BASELINE), None)
        measured = None if baseline is None else baseline.measurement
        return {
            "protocol": PROTOCOL,
            **self._space_told,
            "history": [_trial_told(t, baseline) for t in trials],
            "pending": list(self._history.outstanding.values()),
            "candidates": self._candidates(),
            "diagnosis": _diagnosis_told(measured),
            "advice": _advice_told(causes_in(trials), self.space, self.hints),
            "upper_bounds": _bounds_told(measured, self.space),
            "budget": dict(left),
            "seed": self.seed,
            "error": error or None,
        }

    def _candidates(self) -> list[dict[str, Value]]:
        """Untried configurations: what somebody who knows the field would try, then any."""
        found: dict[str, dict[str, Value]] = {}
        starts = feasible_starts(self.space, self.hints, self._history.trials)
        for point in self._history.untaken(starts)[:_CANDIDATES]:
            found.setdefault(key_of(point), point)
        generator = self._history.generator()
        for _ in range(4 * _CANDIDATES):
            drawn = self._history.draw(generator) if len(found) < _CANDIDATES else None
            if drawn is None:
                break
            found.setdefault(key_of(drawn), drawn)
        return list(found.values())

    # -------------------------------------------------------------------------
    # An answer.

    def _checked(self, given: Any) -> dict[str, Value]:
        """The configuration that an answer stands for, if it may be tried.

        Raises:
            _BadAnswerError: why not.

        """
        if not isinstance(given, dict):
            raise _BadAnswerError(f"configuration={_shown(given)}: no knobs by name. {_FORMS}")
        values: dict[str, Value] = dict(self.hints.baseline)
        try:
            values |= own_values(self.space, self.hints.baseline, given)
        except OutsideError as error:
            value = f"={_shown(error.value)}" if error.name in self.space.by_name else ""
            raise _BadAnswerError(f"configuration.{error.name}{value}: {error.why}") from error
        violations = self.space.violations(values)
        if violations:
            raise _BadAnswerError(f"configuration: {'; '.join(violations)}")
        point = self.space.canonical(values)
        if self._history.taken(point):
            raise _BadAnswerError(f"configuration: {self._of_taken(point)}. Propose another")
        return point

    def _of_taken(self, point: dict[str, Value]) -> str:
        """What became of a configuration that was proposed before."""
        key = key_of(point)
        for trial in self._history.trials:
            if self._history.key(trial.configuration) == key:
                which = "without a trial" if trial.number < 0 else f"as trial {trial.number}"
                return f"it was tried {which}, which ended {trial.status}"
        return "it is being tried"


# -----------------------------------------------------------------------------
# What a question says.


def _space_told(space: Space, hints: Hints) -> dict[str, Any]:
    """What stays the same from question to question."""
    return {
        "space": {
            "knobs": [knob.to_plain() for knob in space.knobs],
            "constraints": [c.explain or c.name for c in space.constraints],
        },
        "baseline": dict(hints.baseline),
        "hints": {
            "effect_order": list(hints.effect_order),
            "monotonic": dict(hints.monotonic),
            "memory_limit_gib": hints.memory_limit_gib,
        },
    }


def _trial_told(trial: Trial, baseline: Trial | None) -> dict[str, Any]:
    measured = trial.measurement
    before = None if baseline is None else baseline.cost
    known = trial.cost is not None and before is not None
    return {
        "trial": None if trial.number < 0 else trial.number,
        "purpose": str(trial.purpose),
        "configuration": dict(trial.configuration),
        "status": str(trial.status),
        "reason": trial.reason,
        "log": trial.log_path,
        "cost": trial.cost,
        "cost_error": trial.cost_error,
        "gain": before / trial.cost - 1 if known and before and trial.cost else None,
        "step_ms": None if measured is None else measured.step_time_s * 1e3,
        "phases_ms": {} if measured is None else dict(measured.phases_ms),
        "peak_gib": None if measured is None else measured.peak_allocated_gib,
        "seconds": trial.seconds,
    }


def _diagnosis_told(measured: Measurement | None) -> dict[str, Any]:
    """What holds the baseline back."""
    known = {} if measured is None else measured.environment
    return {"bottleneck": known.get("bottleneck"), "findings": list(known.get("findings", []))}


def _advice_told(
    found: Mapping[str, Sequence[str]], space: Space, hints: Hints
) -> list[dict[str, Any]]:
    """What is advised on it; ``value`` is for this space, ``None`` where it is not searched."""
    told = []
    for one in advice.on(found):
        knob = None if one.knob is None else space.by_name.get(one.knob.name)
        value = None if knob is None else one.value_in(knob, hints.baseline[knob.name])
        told.append({**one.to_plain(), "value": value})
    return told


def _bounds_told(measured: Measurement | None, space: Space) -> list[dict[str, Any]]:
    """The most that knobs can give, by part of the baseline's step; nothing where it is unknown."""
    return [
        {
            "part": str(bound.part),
            "share": bound.share,
            "gain": bound.gain,
            "evidence": bound.evidence,
            "knobs": [k.name for k in space.knobs if bound.part in affected_parts(k)],
        }
        for bound in ([] if measured is None else upper_bounds(measured))
    ]


# -----------------------------------------------------------------------------
# What an answer says.


class _BadAnswerError(Exception):
    """An answer that cannot be used; the message is for who gave it."""


def _parsed(line: bytes) -> dict[str, Any]:
    """An answer with one of its two keys."""
    try:
        answer = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        text = _short(line.decode(errors="replace"))
        raise _BadAnswerError(f"{text!r}: it is no JSON. {_FORMS}, in one line") from error
    forms = [key for key in ("configuration", "stop") if isinstance(answer, dict) and key in answer]
    if len(forms) != 1 or (forms == ["stop"] and not isinstance(answer["stop"], str)):
        raise _BadAnswerError(f"{_short(line.decode(errors='replace'))}: no answer. {_FORMS}")
    found: dict[str, Any] = answer
    return found


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _shown(value: Any) -> str:
    """A value of an answer as it stood there."""
    if isinstance(value, list | dict):  # which may be deep
        return "[...]" if isinstance(value, list) else "{...}"
    return _short(json.dumps(value))


def _short(text: str) -> str:
    """A foreign text in a line for people."""
    text = in_one_line(text.strip())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -----------------------------------------------------------------------------
# Who is asked.


class _FailedError(Exception):
    """There will be no answer; the message says why."""


class _LateError(Exception):
    """There was no answer in time."""


class _Proposer(Protocol):
    def answer(self, question: bytes, limit_s: float) -> bytes:
        """The line that answers a line.

        Raises:
            _BadAnswerError, _FailedError, _LateError: there is none.

        """

    def close(self) -> None:
        """Let it end."""

    def kill(self) -> None:
        """End it as far as that is possible, before ``close``."""


def _function_of(reference: str) -> Function:
    try:
        found = imported(reference)
    except Exception as error:
        raise BadInputError(
            f"strategy.command={reference}: it cannot be imported: {type(error).__name__}: "
            f"{error}. Give MODULE:FUNCTION of a module that can be imported from here, or from "
            "Python perfsearch.search(..., strategy=FUNCTION)."
        ) from error
    if not callable(found):
        raise BadInputError(f"strategy.command={reference}: it is no function.")
    function: Function = found
    return function


class _InProcess:
    """A function of Python, called in a thread so that there is a limit to its time.

    Args:
        function: takes and returns what a program reads and writes, as plain values.
        log: where its traceback goes.

    """

    def __init__(self, function: Function, log: Path | None) -> None:
        self._log = log
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        passed = (function, self._questions, self._answers)
        threading.Thread(target=_call, args=passed, name="proposer", daemon=True).start()

    def answer(self, question: bytes, limit_s: float) -> bytes:
        """What the function returns, as JSON."""
        self._questions.put(question)
        deadline = time.monotonic() + limit_s
        while True:  # a signal that another thread gets does not end a wait
            left_s = deadline - time.monotonic()
            try:
                answer = self._answers.get(timeout=min(_WAITS_S, max(0.0, left_s)))
                break
            except queue.Empty:
                if left_s <= 0:
                    raise _LateError from None
        if isinstance(answer, BaseException):
            if self._log is not None:
                with self._log.open("a") as file:
                    traceback.print_exception(answer, file=file)
            what = f"it raised {type(answer).__name__}: {_short(str(answer))}"
            raise _FailedError(what) from answer
        try:
            return json.dumps({"stop": ""} if answer is None else answer).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _BadAnswerError(f"{_short(repr(answer))}: {error}. {_FORMS}") from error

    def close(self) -> None:
        """Let the thread end, once the function has returned."""
        self._questions.put(None)

    def kill(self) -> None:
        """Nothing: no thread can be ended from outside."""


def _call(
    function: Function,
    questions: queue.SimpleQueue[bytes | None],
    answers: queue.SimpleQueue[Any],
) -> None:
    while (question := questions.get()) is not None:
        try:
            answers.put(function(json.loads(question)))
        except BaseException as error:  # raised again where the answer is awaited
            answers.put(error)


class _Program:
    """A program that reads questions and writes answers, a line each.

    Nothing that it does can block or fill this process: both pipes are only used when they are
    ready, until the time is over, and no more than ``_LONGEST`` bytes are kept.

    It stays in this process's group, so that it may ask at the terminal; what it leaves behind is
    found by its environment (``Processes``).

    Args:
        words: the program and its arguments.
        variables: its environment.
        log: where its standard error goes; ``None``: nowhere.

    """

    def __init__(self, words: list[str], variables: Mapping[str, str], log: Path | None) -> None:
        with open(os.devnull if log is None else log, "ab") as errors:
            self._errors_from, self._log = errors.tell(), log
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={"PYTHONUNBUFFERED": "1", **variables},  # answers must not wait for more
                    bufsize=0,
                )
            except OSError as error:
                raise _FailedError(f"it cannot be started: {error.strerror}") from error
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin = process, process.stdin
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._end = weakref.finalize(self, _kill, process)

    def answer(self, question: bytes, limit_s: float) -> bytes:
        """Send a line, and return the next one."""
        deadline = time.monotonic() + limit_s
        self._drop_what_nobody_asked_for()
        unsent, read, size = memoryview(question + b"\n"), b"", 0
        while unsent or b"\n" not in read:
            self._wait(deadline, bool(unsent))
            if unsent:
                unsent = unsent[self._write(unsent) :]
            piece = self._read()
            size += len(piece)
            read = (read + piece).lstrip()
            if size > _LONGEST:
                raise _FailedError(f"it wrote more than {_LONGEST >> 20} MiB for one answer")
        return read.partition(b"\n")[0]

    def _drop_what_nobody_asked_for(self) -> None:
        size = 0
        while piece := self._read():
            size += len(piece)
            if size > _LONGEST:
                raise _FailedError(f"it wrote more than {_LONGEST >> 20} MiB unasked")

    def _wait(self, deadline: float, sending: bool) -> None:
        """Wait until a pipe is ready, or the program has ended."""
        pipes = select.poll()
        pipes.register(self._output, select.POLLIN)
        if sending:
            pipes.register(self._input, select.POLLOUT)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _LateError
            if pipes.poll(1e3 * min(left, 0.5)):
                return
            if self._process.poll() is not None:  # what it started may hold its pipes
                raise self._gone()

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._input, data[:65536])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._gone() from None

    def _read(self) -> bytes:
        """What there is now; empty where there is nothing."""
        try:
            piece = os.read(self._output, 65536)
        except BlockingIOError:
            return b""
        if not piece:
            raise self._gone()
        return piece

    def _gone(self) -> _FailedError:
        """Why there will be no answer."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return _FailedError("it closed its standard input or output")
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        said = self._last_words() or ("it should answer line after line" if code == 0 else "")
        return _FailedError(f"it ended {how}{f': {said}' if said else ''}")

    def _last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        if self._log is None:
            return ""
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._errors_from, end - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return _short(lines[-1]) if lines else ""

    def close(self) -> None:
        """End it: by the end of its input, or by force."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self.kill()

    def kill(self) -> None:
        """End it by force."""
        self._end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.kill()
    process.wait()
