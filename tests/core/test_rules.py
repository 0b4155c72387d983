"""Rules between knobs: what they mean, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as some
from support.hostile import any_text

from perfsearch.core.errors import BadInputError
from perfsearch.core.rules import LONGEST, parse, refuse_unknown

VALUES = {
    "micro_batch": 16,
    "gradient_accumulation": 4,
    "view": True,
    "algo": "Ring",
    "cap": None,
    "share": 0.5,
    "layers.linear": "4x1",
}


def refusal_of(text):
    """The message that a text is refused with; empty where it is a rule."""
    try:
        parse(text)
    except BadInputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("micro_batch * gradient_accumulation <= 64", True),
        ("micro_batch * gradient_accumulation < 64", False),
        ("8 <= micro_batch <= 16", True),
        ("micro_batch % 3 == 1 and micro_batch // 3 == 5 and micro_batch / 4 - 1 + 1 == 4", True),
        ("-micro_batch < 0", True),
        ("not view or micro_batch > 100", False),
        ("view", True),
        ("view == true and view == True", True),
        ("view == 1", False),
        ("algo in ['Ring', 'Tree'] and algo not in ('LL',)", True),
        ("algo > 'Alpha'", True),
        ("cap is null or cap <= 8", True),
        ("cap == None", True),
        ("cap is not null", False),
        ("micro_batch == 16.0", True),
        ("layers.linear == '4x1'", True),
    ],
)
def test_what_a_rule_says(text, kept):
    assert parse(text).holds(VALUES) is kept


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cap <= 8", "cap=null: null is no number"),
        ("algo * 2 > 1", "algo=Ring: Ring is no number"),
        ("micro_batch / (gradient_accumulation - 4) < 1", "division by zero"),
        ("algo < 3", "Ring is no number"),
        ("algo or view", "Ring is not true or false"),
        ("view + 1 == 2", "true is no number"),
    ],
)
def test_a_rule_without_an_answer_is_not_kept_and_says_why(text, why):
    rule = parse(text)
    assert not rule.holds(VALUES)
    assert why in rule.why_not(VALUES)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("micro_batch <=", "cannot be read"),
        ("micro_batch = 4", "Did you mean '=='?"),
        ("view && micro_batch < 4", "Did you mean 'and'?"),
        ("view || micro_batch < 4", "Did you mean 'or'?"),
        ("!view", "Did you mean 'not'?"),
        ("micro_batch * 2", "it is not true or false"),
        ("3 < 4", "it names no knob"),
        ("", "cannot be read"),
        ("__import__('os').system('true')", "is not allowed in a rule"),
        ("micro_batch.__class__()", "is not allowed in a rule"),
        ("(lambda: micro_batch)() < 3", "is not allowed in a rule"),
        ("[x for x in micro_batch]", "is not allowed in a rule"),
        ("micro_batch ** 99 ** 99 ** 99 > 1", "is not allowed in a rule"),
        ("micro_batch[0] > 1", "is not allowed in a rule"),
        ("micro_batch > 1j", "is not allowed in a rule"),
        ("micro_batch in algo", "a list is needed"),
        ("micro_batch < 4 if view else false", "is not allowed in a rule"),
        ("(micro_batch := 4) > 1", "is not allowed in a rule"),
        (f"f'{'{'}micro_batch{'}'}' == '1'", "is not allowed in a rule"),
        ("micro_batch < " + "(" * 400 + "1" + ")" * 400, "too many nested parentheses"),
        ("micro_batch < " + "-" * 900 + "x(", "was never closed"),
        ("micro_batch < " + "1" * LONGEST, f"Allowed: {LONGEST}"),
        ("micro_batch\x00 < 1", "null bytes"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(text, why):
    message = refusal_of(text)
    assert why in message
    assert message.startswith("runner.constraints: ")
    assert "\n" not in message


def test_a_wrong_name_is_told_with_the_nearest():
    with pytest.raises(
        BadInputError, match=r"micro_bach: no such knob. Did you mean 'micro_batch'"
    ):
        refuse_unknown(parse("micro_bach < 4"), list(VALUES))


WORDS = ("micro_batch", "view", "algo", "cap", "1", "2.5", "'a'", "true", "null", "<", "==", "in")
WORDS += (
    "and",
    "or",
    "not",
    "(",
    ")",
    "[",
    "]",
    ",",
    "*",
    "/",
    "%",
    "-",
    "is",
    ".",
    "9" * 50,
    "1e308",
)


@given(some.one_of(some.lists(some.sampled_from(WORDS), max_size=12).map(" ".join), any_text()))
def test_any_text_is_a_rule_or_refused_in_one_line(text):
    message = refusal_of(text)
    assert "\n" not in message
    if not message:
        rule = parse(text)
        assert rule.holds({**VALUES, **dict.fromkeys(rule.names, 3)}) in (True, False)
        assert rule.why_not({**VALUES, **dict.fromkeys(rule.names, 3)})
