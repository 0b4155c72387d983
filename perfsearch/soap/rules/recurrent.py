"""Rules of recurrent layers: each sample by itself, all outputs by one run; and of their cells.

A layer is not split over its hidden elements: at each step every one of them reads all of the step
before, so that parts would have to exchange them at each. A cell is one step.
"""

from __future__ import annotations

import math

from perfsearch.soap.capture.lower import (
    Call,
    Lowered,
    Value,
    broadcast_labels,
    counted_flops,
    rule,
    whole,
)
from perfsearch.soap.graph import Axis, Role, Same, Whole

CELL = "recurrent_cell"
"""Kind of a cell's operator."""

CELLS = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}
"""Functions that are one step of a recurrent layer, with the blocks of rows of their weights."""


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


@rule(*CELLS)
def cell(call: Call) -> Lowered | None:
    """Over samples, and over hidden elements once the weights are seen in blocks of rows.

    A hidden element has a row of each block, and reads the whole state before; of an LSTM's memory
    its own element only. Both of an LSTM's outputs lie side by side in a dimension before.
    """
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    weights = [call[n] for n in ("w_ih", "w_hh", "b_ih", "b_hh")]
    tensors = [call["input"], *states]
    if any(v.parameter or len(v.shape) != 2 for v in tensors):
        return None
    if any(w is not None and not w.parameter for w in weights):
        return None
    place = len(call.shape) - 2
    samples, hidden = Same(place), Same(place + 1)
    leading = [Value(v.name, v.shape[:1], v.dtype, v.labels[:1]) for v in tensors]
    labels = broadcast_labels(leading, call.shape[-2:-1])
    lowered = Lowered(
        CELL,
        (*(Role.ATTRIBUTE,) * place, *labels, Role.PARAMETER),
        (*(False,) * place, True, False),
        flops=2.0 * math.prod(weights[0].shape) * call.shape[-2]
        + 2.0 * math.prod(weights[1].shape) * call.shape[-2],
        precision="lower",
    )
    arguments = dict(call.arguments)
    arguments["input"] = lowered.operand(tensors[0], (samples, Whole(tensors[0].shape[1])))
    slots = [lowered.operand(states[0], (samples, Whole(states[0].shape[1])))]
    slots += [lowered.operand(memory, (samples, hidden)) for memory in states[1:]]
    arguments["hx"] = slots if len(slots) > 1 else slots[0]
    for name, weight in zip(("w_ih", "w_hh", "b_ih", "b_hh"), weights, strict=True):
        arguments[name] = lowered.operand(
            weight, () if weight is None else whole(weight.shape), name
        )
    lowered.attributes = {
        "target": str(call.target),
        "arguments": arguments,
        "function": call.name,
        "output": call.output,
    }
    return lowered
