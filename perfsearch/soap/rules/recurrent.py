"""Rules of recurrent layers: each sample by itself, all outputs by one run."""

from __future__ import annotations

from perfsearch.soap.capture.lower import Call, Lowered, Value, counted_flops, rule, whole
from perfsearch.soap.graph import Axis, Same, Whole


def sample_dim(call: Call, number: int) -> int:
    """The dimension of samples of an output, or of the input as output 0."""
    return 0 if number == 0 and call["batch_first"] else 1


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> Lowered | None:
    """Over samples; between layers dropout draws the mask of the whole batch."""
    value = call.get("input")
    if not isinstance(value, Value) or len(value.shape) != 3 or value.parameter:
        return None  # of packed sequences
    mine = sample_dim(call, 0)
    place = 0 if call.output is None else sample_dim(call, call.output)

    def axes(tensor: Value, dim: int) -> list[Axis]:
        return [Same(place) if d == dim else Whole(n) for d, n in enumerate(tensor.shape)]

    count = len(call.shape)
    lowered = Lowered(
        "recurrent",
        tuple(value.labels[mine] if d == place else value.labels[-1] for d in range(count)),
        tuple(d == place for d in range(count)),
        precision="lower",
    )
    states = call["hx"]
    several = isinstance(states, list | tuple)
    held = states if several else [states]
    arguments = dict(call.arguments)
    arguments["input"] = lowered.operand(value, axes(value, mine))
    slots = [lowered.operand(state, axes(state, 1)) for state in held]
    arguments["hx"] = slots if several else slots[0]
    arguments["params"] = [lowered.operand(w, whole(w.shape)) for w in call["params"]]
    lowered.flops = counted_flops(call, lowered)
    drops = call["train"] and call["num_layers"] > 1
    directions = 2 if call["bidirectional"] else 1
    time, batch = value.shape[1 - mine], value.shape[mine]
    lowered.attributes = {
        "target": str(call.target),
        "arguments": arguments,
        "output": call.output,
        "probability": float(call["dropout"]) if drops else 0.0,
        # what is between two layers, which lies with time first
        "scores": (time, batch, held[0].shape[-1] * directions),
        "masks": call["num_layers"] - 1,
        "batch": place,
    }
    return lowered
