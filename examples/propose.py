"""Proposes what is most like the best so far, of what the question suggests.

    perfsearch strategy=external strategy.command='python examples/propose.py'

It may as well ask a model of language: docs/external.md says what is in a question.
"""

import json
import sys

for line in sys.stdin:
    question = json.loads(line)
    if question["error"]:  # why the last answer could not be used
        print(question["error"], file=sys.stderr)
    ran = [trial for trial in question["history"] if trial["status"] == "ok" and trial["cost"]]
    best = min(ran, key=lambda trial: trial["cost"])["configuration"] if ran else {}
    answer = {"stop": "no configuration is suggested"}
    if question["candidates"]:
        nearest = min(
            question["candidates"],
            key=lambda point: sum(best.get(knob) != value for knob, value in point.items()),
        )
        answer = {"configuration": nearest}
    print(json.dumps(answer), flush=True)
