"""Which of a script's knobs are searched, and which are fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Configuration, Knob, Numerics, Scope, Value, same_value
from perfsearch.core.narrow import SEARCH, KnobError, narrow
from perfsearch.core.space import Space
from perfsearch.core.suggest import nearest
from perfsearch.instrument.mapping import Mapped, current
from perfsearch.parallel.wrapper import DEFAULT_BUCKET_MB
from perfsearch.runners import _ddp_knobs, _zero_knobs
from perfsearch.runners._script_knobs import declare
from perfsearch.runners._script_objects import ScriptSurroundings

_OF_FILES = frozenset({*_ddp_knobs.EFFECT_ORDER, *_zero_knobs.EFFECT_ORDER})
"""Knobs that ``conf/runner`` names; what it does not name is searched without being named."""


_OF_ZERO_FILE = {
    "bucket_cap_mb": DEFAULT_BUCKET_MB,
    "forward_prefetch": 0,
    "backward_prefetch": 0,
    "cpu_offload": False,
}
"""What ``conf/runner/zero.yaml`` pins for built-in workloads."""


_OF_OTHER_WORKLOADS = {
    "compile_mode": "none",
    "blocks_per_unit": 1,
    "gradient_sync_each": False,
    "reshard_group_size": 0,
    "mixed_precision": "policy",
    "optimizer_implementation": "default",
}
"""What ``conf/runner`` pins for built-in workloads and no script can have otherwise."""


def without_file(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``runner.knobs`` of ``runner=zero`` without what its option file alone asks for."""
    return {n: v for n, v in knobs.items() if n not in _OF_ZERO_FILE or v != _OF_ZERO_FILE[n]}


@dataclass(frozen=True)
class ScriptSpace:
    """The knobs of a script, as far as they are known.

    Attributes:
        space: of the searched ones.
        baseline: the script's own values of the searched ones.
        pinned: knobs that the user has fixed, and their values.
        declared: every knob that exists, by name.
        left_out: knobs that are not searched, and why.

    """

    space: Space
    baseline: dict[str, Value]
    pinned: dict[str, Value]
    declared: dict[str, Knob]
    left_out: dict[str, str]
    _arguments: Sequence[str]
    _maps: Sequence[Mapped]

    def changed(self, configuration: Configuration) -> dict[str, Value]:
        """The knobs that are not as the script has them, and what follows from them."""
        whole = {**self.pinned, **configuration}
        asked: dict[str, Value] = {
            name: value
            for name, value in whole.items()
            if value is not None and not same_value(value, self._today(name))
        }
        return self._with_accumulation(asked)

    def _today(self, name: str) -> Value:
        if name in self.baseline:
            return self.baseline[name]
        return self.declared[name].default if name in self.declared else None

    def _with_accumulation(self, asked: dict[str, Value]) -> dict[str, Value]:
        """Add the accumulation that keeps the global batch, where it is mapped."""
        maps = {mapped.name: mapped for mapped in self._maps}
        micro = asked.get("micro_batch")
        if micro is None or "gradient_accumulation" not in maps:
            return asked
        names = ("micro_batch", "gradient_accumulation")
        today = [int(current(self._arguments, maps[name]) or 0) for name in names]
        share = today[0] * today[1]
        if share % int(micro):
            raise BadInputError(
                f"runner.knobs.micro_batch={micro}: it does not divide the {share} samples that a "
                "rank trains a step today"
            )
        return {**asked, "gradient_accumulation": share // int(micro)}

    def unheeded(self, wanted: Mapping[str, Any], mapped: Sequence[str]) -> dict[str, str]:
        """What the user named and what has no effect on this script, and why.

        Args:
            wanted: ``runner.knobs``; the option files' own values are nobody's wish.
            mapped: names of the knobs that the user maps.

        """
        lost: dict[str, str] = {}
        maps = {
            m.name: f"--map{'-file' * bool(m.file)} {m.name}={m}"
            for m in self._maps
            if m.name in mapped
        }
        for name, why in self.left_out.items():
            asked = wanted.get(name)
            files = (SEARCH, None, _OF_ZERO_FILE.get(name), _OF_OTHER_WORKLOADS.get(name))
            if name in maps:
                lost[maps[name]] = why
            elif not any(asked is file or asked == file for file in files):
                lost[f"runner.knobs.{name}={asked}"] = why
        for name in maps.keys() & self.declared.keys() - self.baseline.keys() - wanted.keys():
            values = f"only {self.declared[name].default} is known of it. Name other values: "
            lost[maps[name]] = f"{values}-o 'runner.knobs.{name}=[A,B]'"
        if "micro_batch" in self.baseline.keys() | self.pinned.keys():
            lost.pop(maps.get("gradient_accumulation", ""), None)  # it follows
        return lost

    def scope(self, names: set[str]) -> set[Scope]:
        """What must restart to change these knobs."""
        known = self.declared
        return {known[n].scope if n in known else Scope.PROCESS for n in names}


def settle(where: ScriptSurroundings, allowed: Numerics) -> ScriptSpace:
    """Sort the knobs that a script has by what the user wants of them.

    Raises:
        KnobError: there is no such knob, or it cannot take the value.

    """
    declared, absent = declare(where)
    mapped = frozenset(m.name for m in where.maps)
    settings, left_out = _applicable(where.wanted, mapped, declared, absent, allowed)
    searched, pinned = narrow(declared, settings, allowed)
    left_out = {**{name: absent[name] for name in mapped & absent.keys()}, **left_out}
    return ScriptSpace(
        space=Space(searched),
        baseline={knob.name: knob.default for knob in searched},
        pinned=pinned,
        declared={knob.name: knob for knob in declared},
        left_out=left_out,
        _arguments=where.arguments,
        _maps=where.maps,
    )


def _applicable(
    wanted: Mapping[str, Any],
    mapped: frozenset[str],
    declared: Sequence[Knob],
    absent: Mapping[str, str],
    allowed: Numerics,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of ``runner.knobs`` there is in this script, and why the rest is left out.

    The option files name knobs of other workloads too; they are left out without a word.
    """
    by_name = {knob.name: knob for knob in declared}
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, setting in wanted.items():
        if name in by_name:
            too_much = by_name[name].numerics.rank > allowed.rank
            if too_much and setting == SEARCH:
                left_out[name] = f"it is {by_name[name].numerics} and numerics={allowed}"
            else:
                settings[name] = setting
        elif name in absent or name in _OF_FILES:
            left_out[name] = absent.get(name, "it cannot be given to a script from outside")
        else:
            everything = {*by_name, *absent}
            raise KnobError(f"runner.knobs.{name}: no such knob. {nearest(name, everything)}")
    if SEARCH in [s for s in wanted.values() if isinstance(s, str)]:
        for name in by_name.keys() - wanted.keys() - (_OF_FILES - mapped):
            if by_name[name].numerics.rank <= allowed.rank and by_name[name].count != 1:
                settings[name] = SEARCH
    return settings, left_out
