"""From a part of an operator to the function that computes it; prepared once, called each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from perfsearch.soap.capture.lower import Slot
from perfsearch.soap.graph import Operator, Rectangle, Stage, Summand, Window, within
from perfsearch.soap.rules.base import input_rectangle, sizes, stage_rectangles

Inputs = Sequence[torch.Tensor | None]
Parameters = Mapping[str, torch.Tensor]
Function = Callable[[Inputs, Parameters], torch.Tensor]
"""Takes what a part reads, and gives what it computes."""

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""All-reduces a tensor over parts of an operator that share something; in place."""


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The reduction over one part."""
    return tensor


ShareSums = Callable[[torch.Tensor, Summand], torch.Tensor]
"""Takes a part's share of sums, for the elements of all who share, and gives its own elements."""


def own_elements(partial: torch.Tensor, part: Summand) -> torch.Tensor:
    """Those of the part, without what others would add."""
    low, high = part.own
    return partial.narrow(part.dim, low - part.span[0], high - low)


@dataclass(frozen=True)
class PartContext:
    """Where a part computes, and how it reduces with the others.

    Attributes:
        device: where it computes.
        reduce_all: partial sums over all parts of the operator.
        reduce_channels: over those parts that have the same channels.
        share_sums: adds what parts that share sums have, and gives each its own elements.
        buffers: of the model, by name, for statistics that are kept.

    """

    device: torch.device
    reduce_all: Reduce = alone
    reduce_channels: Reduce = alone
    share_sums: ShareSums = own_elements
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One stage of one part.

    Attributes:
        stage: which.
        rectangle: of the stage's output.
        reads: rectangles of its inputs.
        context: of the part.
        summand: the part, where it shares the stage's sums with others.

    """

    stage: Stage
    rectangle: Rectangle
    reads: tuple[Rectangle | None, ...]
    context: PartContext
    summand: Summand | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of what it computes."""
        return sizes(self.rectangle)

    @property
    def computed_sizes(self) -> tuple[int, ...]:
        """The same of what it computes before sums are shared."""
        if self.summand is None:
            return self.sizes
        return sizes(self.summand.of_all(self.rectangle))

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The part's own elements of what it has computed of sums."""
        if self.summand is None:
            return value
        return self.context.share_sums(value, self.summand)

    def __getitem__(self, attribute: str) -> Any:
        return self.stage.attributes[attribute]


Builder = Callable[[Piece], Function]

KERNELS: dict[str, Builder] = {}


def kernel(*kinds: str) -> Callable[[Builder], Builder]:
    """Register what builds a stage's function."""

    def register(builder: Builder) -> Builder:
        KERNELS.update(dict.fromkeys(kinds, builder))
        return builder

    return register


def prepare(operator: Operator, part: Rectangle, context: PartContext) -> Function:
    """The function that computes a part.

    Its inputs hold exactly ``rules.input_rectangle``, its parameters ``parameter_rectangles``.
    That of a loss gives a scalar: the part's share of the sum.
    """
    rectangles = stage_rectangles(operator, part)
    needs = tuple(input_rectangle(operator, i, part) for i in range(len(operator.inputs)))
    functions = []
    for i, (stage, rectangle) in enumerate(zip(operator.stages, rectangles, strict=True)):
        reads = needs if i == 0 else (rectangles[i - 1],)
        shared = part if i == 0 and isinstance(part, Summand) else None
        built = KERNELS[stage.kind](Piece(stage, rectangle, reads, context, shared))
        precision = stage.attributes.get("cast")
        functions.append(built if precision is None else _in_precision(built, precision))
    if len(functions) == 1:
        return functions[0]
    head, followers = functions[0], functions[1:]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = head(inputs, parameters)
        for follower in followers:
            value = follower((value,), parameters)
        return value

    return run


def forward(
    operator: Operator, part: Rectangle, inputs: Inputs, parameters: Parameters
) -> torch.Tensor:
    """Compute a part once, by itself: without what others would add to it."""
    tensors = [t for t in (*inputs, *parameters.values()) if t is not None]
    device = tensors[0].device if tensors else torch.device("cpu")
    return prepare(operator, part, PartContext(device))(inputs, parameters)


def _in_precision(function: Function, name: str) -> Function:
    """What autocast does around one function, spelled out."""
    dtype: torch.dtype = getattr(torch, name)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        lowered = {name: tensor.to(dtype) for name, tensor in parameters.items()}
        return function([cast(tensor) for tensor in inputs], lowered)

    return run


# -----------------------------------------------------------------------------
# Kernels of functions that are called as they stand, and of dropout.

Filler = Callable[[Inputs, Parameters], Any]


def overload(name: str) -> Any:
    """The function that ``str`` of it names, such as ``aten.add.Tensor``."""
    space, function, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), function), variant)


def fill_template(template: Any, device: torch.device) -> Filler:
    """Puts operands into the places that a template of arguments keeps for them."""
    if isinstance(template, Slot):
        if template.name:
            return lambda inputs, parameters: parameters[template.name]
        return lambda inputs, parameters: inputs[template.index]
    if isinstance(template, dict):
        parts = {name: fill_template(part, device) for name, part in template.items()}
        return lambda inputs, parameters: {n: f(inputs, parameters) for n, f in parts.items()}
    if isinstance(template, list | tuple) and _holds_slot(template):
        items = [fill_template(part, device) for part in template]
        return lambda inputs, parameters: [f(inputs, parameters) for f in items]
    if isinstance(template, torch.device):
        return lambda inputs, parameters: device
    return lambda inputs, parameters: template


def _holds_slot(template: Any) -> bool:
    if isinstance(template, list | tuple):
        return any(_holds_slot(part) for part in template)
    return isinstance(template, Slot)


def raw_call(piece: Piece) -> Callable[[Inputs, Parameters], Any]:
    """The traced function with its own arguments, and all that it gives."""
    target = overload(piece["target"])
    # most have tensors first and plain values behind: these are kept ready, and called by place
    names = [argument.name for argument in target._schema.arguments]
    by_keyword = {a.name for a in target._schema.arguments if a.kwarg_only}
    arguments = piece["arguments"]
    device = piece.context.device
    places = [
        fill_template(arguments[n], device) for n in names if n in arguments and n not in by_keyword
    ]
    keywords = {n: fill_template(v, device) for n, v in arguments.items() if n in by_keyword}

    def run(inputs: Inputs, parameters: Parameters) -> Any:
        return target(
            *[f(inputs, parameters) for f in places],
            **{n: f(inputs, parameters) for n, f in keywords.items()},
        )

    return run


@kernel("pointwise", "call", "whole")
def call(piece: Piece) -> Function:
    """What the traced function gives; one of several tensors, or several put into one."""
    if piece.summand is not None:
        return _added_product(piece)
    return _given(raw_call(piece), piece)


def _added_product(piece: Piece) -> Function:
    """``addmm`` or ``baddbmm`` of a part that shares its sums: what is added comes last, once."""
    filled = fill_template(dict(piece["arguments"]), piece.context.device)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        given = filled(inputs, parameters)
        left, right = (given[n] for n in given if n in ("mat1", "mat2", "batch1", "batch2"))
        product = piece.total(torch.matmul(left, right) * given.get("alpha", 1))
        return product + given.get("beta", 1) * given["self"]

    return run


def _given(function: Callable[[Inputs, Parameters], Any], piece: Piece) -> Function:
    output = piece.stage.attributes.get("output")
    pack: Sequence[tuple[int, int | None]] = piece.stage.attributes.get("pack", ())
    if pack:
        return lambda inputs, parameters: _put_together(function(inputs, parameters), pack)
    if output is not None:
        return lambda inputs, parameters: function(inputs, parameters)[output]
    return function


def _put_together(
    results: Sequence[torch.Tensor], pack: Sequence[tuple[int, int | None]]
) -> torch.Tensor:
    """Several outputs as one tensor: a row a sample, or all elements in one."""
    if pack[0][1] is None:
        return torch.cat([results[number].reshape(-1) for number, _ in pack])
    rows = [results[number].movedim(dim or 0, 0) for number, dim in pack]
    return torch.cat([row.reshape(row.shape[0], -1) for row in rows], 1)


@kernel("unpack")
def unpack(piece: Piece) -> Function:
    """One of the outputs that were put together."""
    samples = piece["samples"]
    shape = list(piece.sizes)
    if samples is not None:
        shape.insert(0, shape.pop(samples))

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = _only(inputs).reshape(shape)
        return value if samples is None else value.movedim(0, samples)

    return run


@kernel("cast")
def cast(piece: Piece) -> Function:
    """Another dtype; the same tensor where it has that already."""
    dtype: torch.dtype = getattr(torch, piece["dtype"])
    device = piece.context.device
    detached = piece.stage.attributes.get("detach", False)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        assert value is not None
        # what the user's code made on the host it also moves by a cast
        return (value.detach() if detached else value).to(device, dtype)

    return run


@kernel("constant")
def constant(piece: Piece) -> Function:
    """Of one value."""
    dtype: torch.dtype = getattr(torch, piece["dtype"])
    shape, device, fill = piece.sizes, piece.context.device, piece["fill"]
    return lambda inputs, parameters: torch.full(shape, fill, dtype=dtype, device=device)


@kernel("parameter")
def parameter(piece: Piece) -> Function:
    """A parameter that is used as a tensor."""

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = parameters["value"]
        return value.view_as(value)

    return run


def whole_mask(
    shape: Sequence[int],
    order: Sequence[int],
    probability: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """What one device would draw for the whole tensor, scaled.

    Args:
        shape: of the whole.
        order: its dimensions as they lie in memory, in which numbers are drawn.
        probability: of zero.
        dtype: of the tensor.
        device: where it is.

    """
    laid = torch.ones([shape[d] for d in order], dtype=dtype, device=device)
    ones = laid.permute([list(order).index(d) for d in range(len(order))])
    return functional.dropout(ones, probability, training=True)


@kernel("dropout")
def dropout(piece: Piece) -> Function:
    """Its part of the mask of the whole tensor."""
    mine = within(piece.rectangle, tuple((0, size) for size in piece.stage.shape))
    shape, order, probability = piece.stage.shape, piece["order"], piece["probability"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = _only(inputs)
        return value * whole_mask(shape, order, probability, value.dtype, value.device)[mine]

    return run


def feature_mask(
    shape: Sequence[int], probability: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What one device would draw for the channels of a whole tensor, scaled."""
    kept = torch.empty(list(shape), dtype=dtype, device=device).bernoulli_(1 - probability)
    return kept if probability == 1 else kept.div_(1 - probability)


@kernel("feature_dropout")
def feature_dropout(piece: Piece) -> Function:
    """Its part of the mask of the whole tensor's channels."""
    shape, probability = piece["scores"], piece["probability"]
    mine = (*within(piece.rectangle[:2], tuple((0, size) for size in shape[:2])), ...)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = _only(inputs)
        return value * feature_mask(shape, probability, value.dtype, value.device)[mine]

    return run


def whole_numbers(
    stage: Stage, device: torch.device, chances: torch.Tensor | None = None
) -> torch.Tensor:
    """The random numbers that one device would draw for the whole tensor.

    Args:
        stage: that draws them.
        device: where they are drawn.
        chances: of each, where the function takes them; each takes one number whatever they are.

    """
    order = list(stage.attributes["order"])
    laid = [stage.shape[d] for d in order]
    back = [order.index(d) for d in range(len(order))]
    target = overload(stage.attributes["target"])
    names = [argument.name for argument in target._schema.arguments]
    arguments = dict(stage.attributes["arguments"])
    dtype: torch.dtype = getattr(torch, stage.dtype)
    if stage.attributes["given"]:
        arguments["self"] = torch.zeros(laid, dtype=dtype, device=device)
    if "size" in names:
        arguments["size"] = laid
    if "device" in names:
        arguments["device"] = device
    if stage.attributes["chances"] is not None:
        if chances is None:
            chances = torch.full(stage.shape, 0.5, dtype=torch.float64, device=device)
        given = chances.permute(order).contiguous()
        arguments[stage.attributes["chances"]] = given
    by_name = {a.name for a in target._schema.arguments if a.kwarg_only}
    drawn: torch.Tensor = target(
        *[arguments[n] for n in names if n in arguments and n not in by_name],
        **{n: v for n, v in arguments.items() if n in by_name},
    )
    return drawn.permute(back) if order else drawn


@kernel("random")
def random(piece: Piece) -> Function:
    """Its part of the numbers of the whole tensor."""
    stage, device = piece.stage, piece.context.device
    mine = within(piece.rectangle, tuple((0, size) for size in stage.shape))

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        if stage.attributes["chances"] is None:
            return whole_numbers(stage, device)[mine]
        given = _only(inputs).detach()
        chances = torch.full(stage.shape, 0.5, dtype=given.dtype, device=device)
        chances[mine] = given
        return whole_numbers(stage, device, chances)[mine]

    return run


# -----------------------------------------------------------------------------
# Kernels of recurrent layers.


@kernel("recurrent")
def recurrent(piece: Piece) -> Function:
    """The function itself; where it drops, a layer at a time, with the whole batch's masks."""
    if not piece["probability"]:
        return call(piece)
    return _given(_layer_by_layer(piece), piece)


def _layer_by_layer(piece: Piece) -> Callable[[Inputs, Parameters], Any]:
    target = overload(piece["target"])
    arguments = fill_template(dict(piece["arguments"]), piece.context.device)
    layers = piece["masks"] + 1
    mine = slice(*piece.rectangle[piece["batch"]])

    def run(inputs: Inputs, parameters: Parameters) -> Any:
        given = arguments(inputs, parameters)
        several = isinstance(given["hx"], list)
        states = given["hx"] if several else [given["hx"]]
        weights = given["params"]
        each = len(weights) // layers
        held = states[0].shape[0] // layers
        value = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
        ends: list[list[torch.Tensor]] = []
        for layer in range(layers):
            own = [state[layer * held : (layer + 1) * held].contiguous() for state in states]
            value, *last = target(
                value,
                own if several else own[0],
                weights[layer * each : (layer + 1) * each],
                given["has_biases"],
                1,
                0.0,
                given["train"],
                given["bidirectional"],
                False,
            )
            ends.append(last)
            if layer < layers - 1:
                mask = _layer_mask(piece.stage, value.dtype, value.device)
                value = value * mask[:, mine]
        if given["batch_first"]:
            value = value.transpose(0, 1)
        return (value, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return run


def _layer_mask(stage: Stage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = stage.attributes["scores"]
    probability = stage.attributes["probability"]
    return whole_mask(shape, tuple(range(len(shape))), probability, dtype, device)


@kernel("recurrent_cell")
def recurrent_cell(piece: Piece) -> Function:
    """The function itself; of some of the hidden elements, what it computes, written out."""
    low, high = piece.rectangle[-1]
    both = len(piece.rectangle) > 2
    output = piece["output"]
    gates = piece.stage.attributes.get("gates")
    whole = (high - low) == piece.stage.shape[-1]
    cell = raw_call(piece) if whole else _hidden_part(piece, low, high)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        if gates is not None:
            parameters = {name: weight.flatten(0, 1) for name, weight in parameters.items()}
        found: Any = cell(inputs, parameters)
        if both:
            return torch.stack(list(found))
        result: torch.Tensor = found if output is None else found[output]
        return result

    return run


def _hidden_part(piece: Piece, low: int, high: int) -> Callable[[Inputs, Parameters], Any]:
    function: str = piece["function"]

    def run(inputs: Inputs, parameters: Parameters) -> Any:
        value, state = inputs[0], inputs[1]
        assert state is not None
        read = functional.linear(value, parameters["w_ih"], parameters.get("b_ih"))
        kept = functional.linear(state, parameters["w_hh"], parameters.get("b_hh"))
        if function == "gru_cell":
            (r, z, n), (kept_r, kept_z, kept_n) = read.chunk(3, 1), kept.chunk(3, 1)
            update = torch.sigmoid(z + kept_z)
            new = torch.tanh(n + torch.sigmoid(r + kept_r) * kept_n)
            return new + update * (state[:, low:high] - new)
        if function == "lstm_cell":
            i, f, g, o = (read + kept).chunk(4, 1)
            memory = torch.sigmoid(f) * inputs[2] + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(memory), memory
        return (torch.tanh if function == "rnn_tanh_cell" else torch.relu)(read + kept)

    return run


# -----------------------------------------------------------------------------
# What a rank without a part draws, so that generators of all ranks stay alike.


def draw(stage: Stage, device: torch.device) -> None:
    """Draw what the whole of a stage draws."""
    dtype: torch.dtype = getattr(torch, stage.dtype)
    if stage.kind == "random":
        whole_numbers(stage, device)
    elif stage.kind == "feature_dropout":
        feature_mask(stage.attributes["scores"], stage.attributes["probability"], dtype, device)
    elif stage.kind == "recurrent":
        for _ in range(stage.attributes["masks"]):
            _layer_mask(stage, dtype, device)
    else:
        shape = stage.attributes.get("scores", stage.shape)
        order = stage.attributes.get("order", tuple(range(len(shape))))
        whole_mask(shape, order, stage.attributes["probability"], dtype, device)


# -----------------------------------------------------------------------------
# Kernels of losses: a part gives its share of the sum over all parts.


def _scale(piece: Piece) -> float:
    """What the user's code multiplies the loss by."""
    return float(piece.stage.attributes.get("scale", 1.0))


@kernel("elementwise_loss")
def elementwise_loss(piece: Piece) -> Function:
    """The sum of the part's terms over the number of all terms."""
    summed = call(piece)
    factor = _scale(piece) / piece["terms"]
    return lambda inputs, parameters: summed(inputs, parameters) * factor


@kernel("total")
def total(piece: Piece) -> Function:
    """The same of the values themselves."""
    factor = _scale(piece) / piece["terms"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        assert value is not None
        return value.sum() * factor

    return run


@kernel("class_loss")
def class_loss(piece: Piece) -> Function:
    """What is divided by is known only when all parts have counted their targets."""
    function = functional.cross_entropy if piece["normalise"] else functional.nll_loss
    options = {"ignore_index": piece["ignore_index"], "reduction": "sum"}
    if piece["normalise"]:
        options["label_smoothing"] = piece["label_smoothing"]
    mean, weighted, ignored = piece["mean"], piece["weighted"], piece["ignore_index"]
    scale = _scale(piece)
    reduce = piece.context.reduce_all

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value, target = inputs[:2]
        weight = inputs[2] if weighted else None
        assert value is not None and target is not None
        terms: torch.Tensor = function(value, target, weight, **options)
        if not mean:
            return terms * scale
        counted = target != ignored
        counts = counted.to(terms.dtype)
        if weight is not None:
            counts = counts * weight[target.masked_fill(~counted, 0)]
        return terms * (scale / reduce(counts.sum()))

    return run


# -----------------------------------------------------------------------------
# Kernels of normalisations.


@kernel("layer_norm")
def layer_norm(piece: Piece) -> Function:
    """Of whole rows."""
    shape, eps = piece["normalized_shape"], piece["eps"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters.get("weight"), parameters.get("bias")
        return functional.layer_norm(inputs[0], shape, weight, bias, eps)

    return run


@kernel("rms_norm")
def rms_norm(piece: Piece) -> Function:
    """Of whole rows."""
    shape, eps = piece["normalized_shape"], piece["eps"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return functional.rms_norm(inputs[0], shape, parameters.get("weight"), eps)

    return run


class _Normalised(torch.autograd.Function):  # type: ignore[misc]
    """Centred and scaled by statistics of all parts; the backward pass all-reduces two."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        reduce, count = rest
        shape = [1, -1] + [1] * (value.dim() - 2)
        normal = (value - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale)
        ctx.reduce, ctx.count = reduce, count
        return normal

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, scale = ctx.saved_tensors
        dims = [d for d in range(gradient.dim()) if d != 1]
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        means = ctx.reduce(sums) / ctx.count
        shape = [1, -1] + [1] * (gradient.dim() - 2)
        centred = gradient - means[0].view(shape) - normal * means[1].view(shape)
        return centred * scale.view(shape), None, None, None, None


def _unshared_norm(piece: Piece, kept: list[torch.Tensor]) -> Function:
    """Torch's own, where the part has all of its channels' elements."""
    eps, momentum = piece["eps"], piece["momentum"]
    mean, variance = kept if kept else (None, None)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters.get("weight"), parameters.get("bias")
        return functional.batch_norm(inputs[0], mean, variance, weight, bias, True, momentum, eps)

    return run


@kernel("batch_norm")
def batch_norm(piece: Piece) -> Function:
    """Statistics of the whole batch: partial sums of the parts, all-reduced in double precision."""
    eps, momentum, count = piece["eps"], piece["momentum"], piece["count"]
    reduce: Reduce = piece.context.reduce_channels
    low, high = piece.rectangle[1]
    kept = [
        piece.context.buffers[n][low:high] for n in piece["running"] if n in piece.context.buffers
    ]
    if reduce is alone:
        return _unshared_norm(piece, kept)
    dims = [d for d in range(len(piece.rectangle)) if d != 1]
    local = 1
    for dim in dims:
        local *= piece.sizes[dim]

    def statistics(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(value, dims, correction=0)
        mean, variance = mean.double(), variance.double()
        sums = reduce(torch.stack([mean * local, (variance + mean * mean) * local])) / count
        return sums[0], (sums[1] - sums[0] * sums[0]).clamp_(min=0)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        given = inputs[0]
        assert given is not None
        # as fused kernels do: half precision in and out, not in between
        value = given.float() if given.dtype.itemsize < 4 else given
        with torch.no_grad():
            mean, variance = statistics(value)
            if kept:
                unbiased = variance * (count / max(count - 1, 1))
                kept[0].lerp_(mean.to(kept[0].dtype), momentum)
                kept[1].lerp_(unbiased.to(kept[1].dtype), momentum)
            scale = (variance + eps).rsqrt().to(value.dtype)
            mean = mean.to(value.dtype)
        normal: torch.Tensor = _Normalised.apply(value, mean, scale, reduce, count)
        shape = [1, -1] + [1] * (value.dim() - 2)
        if "weight" in parameters:
            normal = normal * parameters["weight"].view(shape)
        if "bias" in parameters:
            normal = normal + parameters["bias"].view(shape)
        return normal.to(given.dtype)

    return run


# -----------------------------------------------------------------------------
# Kernels of functions that move elements.


def _only(inputs: Inputs) -> torch.Tensor:
    value = inputs[0]
    assert value is not None
    return value


@kernel("permute")
def permute(piece: Piece) -> Function:
    """A view."""
    dims = piece["dims"]
    return lambda inputs, parameters: _only(inputs).permute(dims)


@kernel("reshape")
def reshape(piece: Piece) -> Function:
    """A reshape of the part; of whole blocks first where the part cuts through some."""
    shape = list(piece.sizes)
    cuts = []
    source = piece.reads[0]
    assert source is not None
    for dim, before, block in piece["folds"]:
        start = piece.rectangle[dim][0] - source[before][0] * block
        covered = (source[before][1] - source[before][0]) * block
        if covered != shape[dim]:
            cuts.append((dim, start, shape[dim]))
        shape[dim] = covered

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = _only(inputs).reshape(shape)
        for dim, start, length in cuts:
            value = value.narrow(dim, start, length)
        return value

    return run


@kernel("slice")
def slice_(piece: Piece) -> Function:
    """What is read begins and ends where the part does; steps and single indices remain."""
    picks = tuple(slice(None, None, step) if step else 0 for step in piece["steps"])
    return lambda inputs, parameters: _only(inputs)[picks]


@kernel("expand")
def expand(piece: Piece) -> Function:
    """A view."""
    shape = piece.sizes
    return lambda inputs, parameters: _only(inputs).expand(shape)


@kernel("concatenate")
def concatenate(piece: Piece) -> Function:
    """Of the inputs that reach into the part."""
    dim = piece["dim"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return torch.cat([value for value in inputs if value is not None], dim)

    return run


@kernel("stack")
def stack(piece: Piece) -> Function:
    """All inputs."""
    dim = piece["dim"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return torch.stack([value for value in inputs if value is not None], dim)

    return run


@kernel("picked")
def picked(piece: Piece) -> Function:
    """By indices along one dimension."""
    dim, kept = piece["dim"], piece["kept"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value, indices = inputs[:2]
        assert value is not None and indices is not None
        if kept:
            return value.gather(dim, indices)
        return value.gather(dim, indices.unsqueeze(dim)).squeeze(dim)

    return run


@kernel("index")
def index(piece: Piece) -> Function:
    """Indexed dimensions are whole, so that indices hold."""
    before: tuple[slice, ...] = (slice(None),) * piece["first"]
    assert all(r is not None and sizes(r) for r in piece.reads)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return _only(inputs)[(*before, *inputs[1:])]

    return run


# -----------------------------------------------------------------------------
# Kernels of matrix products, embeddings and attention.


@kernel("linear")
def linear(piece: Piece) -> Function:
    """Rows of the weight, or blocks of rows."""
    blocks = piece.stage.attributes.get("blocks", 0)
    split = piece.computed_sizes[-blocks:] if blocks else ()

    def product(value: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not split:
            return functional.linear(value, weight, bias)
        rows = weight.flatten(0, -2)
        flat = None if bias is None else bias.flatten()
        return functional.linear(value, rows, flat).unflatten(-1, split)

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        weight, bias = parameters["weight"], parameters.get("bias")
        if piece.summand is None:
            return product(inputs[0], weight, bias)
        value = piece.total(product(inputs[0], weight, None))
        return value if bias is None else value + bias

    return run


@kernel("matmul")
def matmul(piece: Piece) -> Function:
    """As torch broadcasts it."""
    left, right = (fill_template(slot, piece.context.device) for slot in piece["operands"])

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        return piece.total(torch.matmul(left(inputs, parameters), right(inputs, parameters)))

    return run


@kernel("embedding")
def embedding(piece: Piece) -> Function:
    """Columns of the table."""
    padding = piece["padding_idx"]
    padding = None if padding is None or padding < 0 else padding
    return lambda inputs, parameters: functional.embedding(
        inputs[0], parameters["weight"], padding_idx=padding
    )


@kernel("embedding_bag")
def embedding_bag(piece: Piece) -> Function:
    """Bags of one size are rows of indices; ragged ones begin at the offsets."""
    size, mode = piece["bag_size"], piece["mode"]
    padding = piece["padding_idx"]
    padding = None if padding is None or padding < 0 else padding

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        indices, table = inputs[0], parameters["weight"]
        assert indices is not None
        if size is None:
            return functional.embedding_bag(
                indices, table, inputs[1], mode=mode, padding_idx=padding
            )
        if size == 1 and padding is None:
            return functional.embedding(indices, table)  # the same at a fraction of the launches
        return functional.embedding_bag(
            indices.view(-1, size), table, mode=mode, padding_idx=padding
        )

    return run


@kernel("attention")
def attention(piece: Piece) -> Function:
    """Fused where the part has all query positions and draws nothing; else in its pieces."""
    count = len(piece.stage.shape)
    rows = piece.rectangle[count - 2]
    scores: tuple[int, ...] = piece["scores"]
    order = tuple(range(len(scores)))
    causal, scale, probability = piece["causal"], piece["scale"], piece["probability"]
    partial = rows != (0, piece.stage.shape[-2])
    of_scores = (*piece.rectangle[:-1], (0, scores[-1]))
    mine = within(of_scores, tuple((0, size) for size in scores))

    def allowed(device: torch.device) -> torch.Tensor:
        below = torch.ones(rows[1] - rows[0], scores[-1], dtype=torch.bool, device=device)
        return below.tril(rows[0])

    kept = allowed(piece.context.device) if causal and (partial or probability) else None

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        query, key, value = inputs[:3]
        mask = inputs[3] if len(inputs) > 3 else kept
        assert query is not None and key is not None and value is not None
        if not probability:
            return functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal and not partial, scale=scale
            )
        weights = query @ key.transpose(-2, -1)
        weights = weights * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            weights = weights + mask
        weights = weights.softmax(-1)
        drawn = whole_mask(scores, order, probability, weights.dtype, weights.device)[mine]
        return (weights * drawn) @ value

    return run


# -----------------------------------------------------------------------------
# Kernels of convolutions and pooling: padding is only at the edges of the whole.


def margins(rectangle: Rectangle, windows: Sequence[Window]) -> list[int]:
    """Padding of the part, last dimension first, as ``functional.pad`` takes it."""
    found: list[int] = []
    for window in reversed(windows):
        low, high = rectangle[window.dim]
        start, end = window.reads(rectangle)
        first = low * window.stride - window.padding
        last = (high - 1) * window.stride - window.padding
        last += window.dilation * (window.kernel - 1) + 1
        found += [start - first, last - end]
    return found


def _symmetric(found: Sequence[int]) -> list[int] | None:
    """Both sides alike and none cut off: the function can pad by itself, without a copy."""
    pairs = list(zip(found[::2], found[1::2], strict=True))[::-1]
    return [a for a, b in pairs] if all(a == b >= 0 for a, b in pairs) else None


@kernel("convolution")
def convolution(piece: Piece) -> Function:
    """On the part's window."""
    windows = piece["windows"]
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[len(windows) - 1]
    padding = margins(piece.rectangle, windows)
    own = _symmetric(padding)
    stride, dilation, groups = piece["stride"], piece["dilation"], piece["groups"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0] if own is not None else functional.pad(inputs[0], padding)
        bias = parameters.get("bias")
        return function(value, parameters["weight"], bias, stride, own or 0, dilation, groups)

    return run


@kernel("max_pool")
def max_pool(piece: Piece) -> Function:
    """Padded with what is never the largest."""
    padding = margins(piece.rectangle, piece["windows"])
    kernel_size, stride, dilation = piece["kernel"], piece["stride"], piece["dilation"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = inputs[0]
        if any(padding):
            value = functional.pad(value, padding, value=float("-inf"))
        return functional.max_pool2d(value, kernel_size, stride, 0, dilation)

    return run


@kernel("average_pool")
def average_pool(piece: Piece) -> Function:
    """Padding counts."""
    padding = margins(piece.rectangle, piece["windows"])
    kernel_size, stride = piece["kernel"], piece["stride"]

    def run(inputs: Inputs, parameters: Parameters) -> torch.Tensor:
        value = functional.pad(inputs[0], padding) if any(padding) else inputs[0]
        return functional.avg_pool2d(value, kernel_size, stride)

    return run
