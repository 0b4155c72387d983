"""Asks a person at the terminal what to try next.

    perfsearch strategy=external strategy.command='python examples/ask_person.py'

With ``strategy.answer_s=3600 budget.seconds=null`` the person has an hour for an answer, and with
``strategy.retries=99`` as many mistypings.
"""

import json
import sys


def value_of(text):
    """``25``, ``true`` and ``null`` as JSON has them; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def ask(question, reader, writer):
    """Show what is known, and turn the person's line into an answer."""
    if question["error"]:
        print(question["error"], file=writer)
    elif question["history"]:
        last = question["history"][-1]
        gain = "" if last["gain"] is None else f", {last['gain']:+.1%} against the baseline"
        print(f"{last['configuration']}: {last['status']} {last['reason']}{gain}", file=writer)
    for knob in question["space"]["knobs"]:
        values = knob.get("values", f"{knob.get('low')} to {knob.get('high')}")
        print(f"  {knob['name']}: {values} {knob['unit']} {knob['help']}", file=writer)
    print("KNOB=VALUE ... to try, or an empty line to stop: ", end="", file=writer, flush=True)
    words = [word.partition("=") for word in reader.readline().split()]
    if not words:
        return {"stop": "the person has enough"}
    return {"configuration": {name: value_of(text) for name, _, text in words}}


with open("/dev/tty") as reader, open("/dev/tty", "w") as writer:
    for line in sys.stdin:
        print(json.dumps(ask(json.loads(line), reader, writer)), flush=True)
