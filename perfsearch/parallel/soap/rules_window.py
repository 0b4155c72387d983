"""Rules of convolutions and pooling: a part's window reaches into its neighbours' (the halo)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsearch.parallel.soap.axes import Axis, Same, Whole, Window
from perfsearch.parallel.soap.graph import Role
from perfsearch.parallel.soap.lowering import Call, Lowered, Value, rule, same, whole


def _spread(setting: Sequence[int] | int, count: int) -> list[int]:
    values = [setting] if isinstance(setting, int) else list(setting)
    return values * count if len(values) == 1 else values


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Lowered | None:
    """Output channels are a parameter split, places an attribute split with a halo."""
    value, weight, bias = call["input"], call["weight"], call["bias"]
    spatial = len(weight.shape) - 2
    if not weight.parameter or len(value.shape) != spatial + 2:
        return None
    if isinstance(call["padding"], str) or (bias is not None and not bias.parameter):
        return None
    stride, padding, dilation = (
        _spread(call[name], spatial) for name in ("stride", "padding", "dilation")
    )
    groups = call["groups"]
    windows = tuple(
        Window(2 + i, value.shape[2 + i], weight.shape[2 + i], stride[i], padding[i], dilation[i])
        for i in range(spatial)
    )
    kernel = math.prod(weight.shape[1:])
    lowered = Lowered(
        "convolution",
        (value.labels[0], Role.PARAMETER, *value.labels[2:]),
        (True, groups == 1, *(True for _ in windows)),
        attributes={
            "stride": stride,
            "dilation": dilation,
            "groups": groups,
            "windows": windows,
            "bias": bias is not None,
        },
        flops=2.0 * math.prod(call.shape) * kernel,
        precision="lower",
    )
    lowered.operand(value, (Same(0), Whole(value.shape[1]), *windows))
    channels: Axis = Same(1)
    lowered.operand(weight, (channels, *whole(weight.shape[1:])), "weight")
    lowered.operand(bias, (channels,), "bias")
    return lowered


@rule("max_pool2d", "avg_pool2d")
def pooling(call: Call) -> Lowered | None:
    """Channels and samples freely, places with a halo."""
    value: Value = call["self"]
    if len(value.shape) != 4 or call["ceil_mode"]:
        return None
    kernel = _spread(call["kernel_size"], 2)
    stride = _spread(call["stride"] or kernel, 2)
    padding = _spread(call["padding"], 2)
    average = call.name == "avg_pool2d"
    dilation = [1, 1] if average else _spread(call["dilation"], 2)
    if average and call["divisor_override"] is not None:
        return None
    if average and any(padding) and not call["count_include_pad"]:
        return None
    windows = tuple(
        Window(2 + i, value.shape[2 + i], kernel[i], stride[i], padding[i], dilation[i])
        for i in range(2)
    )
    lowered = Lowered(
        "average_pool" if average else "max_pool",
        value.labels,
        (True,) * 4,
        attributes={
            "kernel": kernel,
            "stride": stride,
            "dilation": dilation,
            "windows": windows,
        },
        flops=float(math.prod(call.shape) * math.prod(kernel)),
    )
    lowered.operand(value, (Same(0), Same(1), *windows))
    return lowered


_BY_SAMPLE_AND_CHANNEL = ("adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_nearest2d")


@rule(*_BY_SAMPLE_AND_CHANNEL)
def by_channel(call: Call) -> Lowered | None:
    """Each sample and channel by itself; places are whole."""
    value = call.get("self", call.get("input"))
    if len(value.shape) != 4:
        return None
    lowered = Lowered("call", value.labels, (True, True, False, False))
    lowered.attributes = {
        "target": str(call.target),
        "arguments": {
            name: lowered.operand(argument, (*same(2), *whole(value.shape[2:])))
            if isinstance(argument, Value)
            else argument
            for name, argument in call.arguments.items()
        },
    }
    return lowered
