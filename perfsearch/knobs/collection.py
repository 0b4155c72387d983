"""When Python collects garbage: by itself, or every so many steps on all ranks together."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from perfsearch.core.knob import Kind, Knob, Value
from perfsearch.knobs.base import Record, Taker, Use

COLLECT_EACH = Record(
    Knob(
        "gc_each_steps", Kind.ORDINAL, 0, values=(0, 10, 50), unit="steps",
        help="Python collects garbage every so many steps, and at no other time; 0: by itself",
    ),
    uses=frozenset({Use.DDP, Use.SCRIPT}), effect=20, takers=(Taker.PROCESS,),
    searched=False,
)  # fmt: skip
"""A rank that collects by itself keeps all others waiting, each time another one."""

RECORDS = (COLLECT_EACH,)

_WHOLE_EACH = 20
"""Of so many collections one goes through all objects, which takes up to half a second; the others
go through those of the two younger generations, as most garbage is young."""


class Collection:
    """Collects garbage of this process at set steps, once that is asked for."""

    def __init__(self) -> None:
        self._each = 0
        self._steps = 0

    def put(self, knobs: Mapping[str, Value]) -> None:
        """Put the value into force; without one, or with 0, Python's own way is put back."""
        each = COLLECT_EACH.number(knobs)
        if each:
            gc.disable()
        elif self._each:
            gc.enable()
        self._each, self._steps = each, 0

    def end_step(self) -> None:
        """Note that a step is over."""
        if self._each:
            self._steps += 1
            if self._steps % self._each == 0:
                gc.collect(1 if self._steps % (_WHOLE_EACH * self._each) else 2)

    def values(self) -> dict[str, Value]:
        """What is in force."""
        return {COLLECT_EACH.name: 0 if gc.isenabled() else self._each}


def code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """What to do in a job's own code."""
    each = COLLECT_EACH.number(knobs)
    if not each:
        return []
    whole = _WHOLE_EACH * each
    often = f"# after every {each} steps: gc.collect(1), and after every {whole}: gc.collect()"
    return ["import gc", "gc.disable()", often]


_PROGRAM = '''

import gc

from torch.optim.optimizer import register_optimizer_step_post_hook

stepped = []


def collect(optimizer, args, kwargs):
    """Collect garbage every {each} steps of the optimizer that stepped first."""
    if not stepped:
        gc.disable()
        stepped.extend([optimizer, 0])
    if optimizer is stepped[0]:
        stepped[1] += 1
        if stepped[1] % {each} == 0:
            gc.collect(1 if stepped[1] % {whole} else 2)


register_optimizer_step_post_hook(collect)
'''


def script_program(knobs: Mapping[str, Value]) -> str:
    """The part of a program that does so to a script; empty where nothing is to be done."""
    each = COLLECT_EACH.number(knobs)
    return _PROGRAM.format(each=each, whole=_WHOLE_EACH * each) if each else ""
