"""Rules of the user's own between knobs, such as ``micro_batch * gradient_accumulation <= 64``.

The text is read by Python's parser and its tree translated into functions, part by part; what is
not among ``_FORMS`` is refused, and nothing is ever evaluated by Python. Weighed against simpleeval
and asteval: both evaluate far more (calls, attributes, comprehensions), which would have to go
again, and neither lists the names of a rule.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsearch.core.errors import BadInputError, nearest, printable
from perfsearch.core.knob import Value, same_value

KEY = "runner.constraints"
"""The key that rules stand under."""

LONGEST = 1000
"""Characters of a rule."""

_EXAMPLE = "micro_batch * gradient_accumulation <= 64"
_FORMS = (
    "names of knobs, numbers, text in quotes, true, false, null, + - * / // %, "
    "< <= > >= == != in, and, or, not, brackets"
)

_WORDS: Mapping[str, Value] = {
    **{"true": True, "false": False, "null": None},
    **{"True": True, "False": False, "None": None},
}
_SIGNS = (("&&", "and"), ("||", "or"), ("!", "not"), ("=", "=="))
"""What other languages write, and what is meant."""

_Values = Mapping[str, Value]
_Part = Callable[[_Values], Any]
"""What a part of a rule is for some values."""


class UndefinedError(ArithmeticError):
    """A rule has no answer for some values: it computes with a text, say; the message says why."""


@dataclass(frozen=True)
class Rule:
    """A rule that configurations must keep.

    Attributes:
        text: as the user wrote it.
        names: of the knobs that it speaks of, in their order.

    """

    text: str
    names: tuple[str, ...]
    _answer: _Part

    def holds(self, values: _Values) -> bool:
        """Whether it is kept; one that has no answer for these values is not."""
        try:
            return bool(self._answer(values))
        except ArithmeticError:  # an ``UndefinedError``, a division by zero, a number too large
            return False

    def why_not(self, values: _Values) -> str:
        """Why it is not kept, with the values that it speaks of, for people."""
        given = ", ".join(f"{name}={_shown(values[name])}" for name in self.names)
        try:
            self._answer(values)
        except ArithmeticError as error:
            return f"{given}: {error}"
        return given

    @property
    def key(self) -> str:
        """The key with this rule, for messages."""
        return f"{KEY}: {printable(self.text)!r}"


def parse(text: str) -> Rule:
    """Read a rule.

    Raises:
        BadInputError: it is none; the message says where, and what is allowed.

    """
    if len(text) > LONGEST:
        raise BadInputError(f"{KEY}: a rule of {len(text)} characters. Allowed: {LONGEST}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        reader = _Reader(text)
        answer = reader.truth(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadInputError):
            raise
        raise _refusal(text, _why_unreadable(text, error)) from error
    if not reader.names:
        raise _refusal(text, "it names no knob")
    return Rule(text, tuple(reader.names), answer)


def refuse_unknown(rule: Rule, known: Sequence[str]) -> None:
    """Refuse a rule that speaks of something that is no knob.

    Raises:
        BadInputError: with the nearest of those that there are.

    """
    for name in rule.names:
        if name not in known:
            raise BadInputError(f"{rule.key}: {name}: no such knob. {nearest(name, known)}")


def _refusal(text: str, why: str) -> BadInputError:
    return BadInputError(
        f"{KEY}: {printable(text)!r}: {why}. Allowed: {_FORMS}; such as {_EXAMPLE!r}"
    )


def _why_unreadable(text: str, error: BaseException) -> str:
    if not isinstance(error, SyntaxError):
        return "it is too deep" if isinstance(error, RecursionError | MemoryError) else str(error)
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|[<>=!]=", "", text)
    meant = next((f". Did you mean {word!r}?" for sign, word in _SIGNS if sign in plain), "")
    where = f" at character {error.offset}" if error.offset else ""
    return f"it cannot be read{where} ({error.msg}){meant}"


class _Reader:
    """Makes functions of the parts of a rule.

    Attributes:
        names: of knobs, as they come, each once.

    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.names: dict[str, None] = {}

    def truth(self, node: ast.expr) -> _Part:
        """A part that is true or false."""
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            over = all if isinstance(node.op, ast.And) else any
            return lambda values: over(part(values) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self.truth(node.operand)
            return lambda values: not part(values)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        value = self.value(node)
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Constant) and not _is_boolean(node):
            raise self._refused(node, "it is not true or false: compare it with something")
        return lambda values: _boolean(value(values))

    def value(self, node: ast.expr) -> _Part:
        """A part that has a value."""
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner, sign = self.value(node.operand), -1 if isinstance(node.op, ast.USub) else 1
            return lambda values: sign * _number(inner(values))
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.value(node.left), self.value(node.right)
            compute = _ARITHMETIC[type(node.op)]
            return lambda values: compute(_number(left(values)), _number(right(values)))
        if isinstance(node, ast.BoolOp | ast.Compare | ast.UnaryOp):
            return self.truth(node)
        raise self._refused(node)

    def _constant(self, node: ast.Constant) -> _Part:
        value = node.value
        if value is not None and not isinstance(value, bool | int | float | str):
            raise self._refused(node)
        return lambda values: value

    def _named(self, node: ast.Name | ast.Attribute) -> _Part:
        """A knob, whose name may have dots in it."""
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            if not isinstance(inner.value, ast.Name | ast.Attribute):
                raise self._refused(node)
            inner = inner.value
        name = ".".join([inner.id, *reversed(parts)])
        if name in _WORDS:
            word = _WORDS[name]
            return lambda values: word
        self.names[name] = None
        return operator.itemgetter(name)

    def _comparison(self, node: ast.Compare) -> _Part:
        sides = [node.left, *node.comparators]
        pairs: list[_Part] = []
        for left, sign, right in zip(sides, node.ops, sides[1:], strict=False):
            pairs.append(self._pair(left, sign, right))
        return lambda values: all(pair(values) for pair in pairs)

    def _pair(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> _Part:
        one = self.value(left)
        if isinstance(sign, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self._refused(right, "after 'in' a list is needed, as in x in [1, 2]")
            choices, wanted = [self.value(c) for c in right.elts], isinstance(sign, ast.In)
            return lambda values: (
                any(same_value(one(values), choice(values)) for choice in choices) is wanted
            )
        other = self.value(right)
        if isinstance(sign, ast.Eq | ast.Is):
            return lambda values: same_value(one(values), other(values))
        if isinstance(sign, ast.NotEq | ast.IsNot):
            return lambda values: not same_value(one(values), other(values))
        compare = _ORDER[type(sign)]
        return lambda values: compare(*_comparable(one(values), other(values)))

    def _refused(self, node: ast.expr, why: str = "it is not allowed in a rule") -> BadInputError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return _refusal(self._text, f"{printable(part)!r}: {why}")


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _is_boolean(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UndefinedError(f"{_shown(value)} is no number")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UndefinedError(f"{_shown(value)} is not true or false")
    return value


def _comparable(left: Any, right: Any) -> tuple[Any, Any]:
    if isinstance(left, str) and isinstance(right, str):
        return left, right
    return _number(left), _number(right)


def _shown(value: Value) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
