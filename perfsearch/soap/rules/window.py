"""Rules of convolutions and pooling: a part's window reaches into its neighbours' (the halo)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsearch.soap.capture.lower import Call, Lowered, Value, rule, same, whole
from perfsearch.soap.graph import Axis, Role, Same, Whole, Window


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
    if bias is not None and not bias.parameter:
        return None
    stride, dilation = (_spread(call[name], spatial) for name in ("stride", "dilation"))
    padding = _padding(call["padding"], weight.shape[2:], dilation)
    if padding is None:
        return None
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


def _padding(
    setting: Sequence[int] | int | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[int] | None:
    """In numbers; ``None`` where the two sides differ."""
    if not isinstance(setting, str):
        return _spread(setting, len(kernel))
    reach = [d * (k - 1) if setting == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return None if any(total % 2 for total in reach) else [total // 2 for total in reach]


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


@rule(
    "group_norm",
    "instance_norm",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "pixel_shuffle",
)
def by_sample(call: Call) -> Lowered | None:
    """Each sample by itself; all else is whole."""
    value: Value = call.get("input", call.get("self"))
    others = [v for v in call.arguments.values() if isinstance(v, Value) and v is not value]
    if value.parameter or any(not v.parameter for v in others) or len(value.shape) < 3:
        return None
    if len(value.shape) != len(call.shape) or call.get("use_input_stats") is False:
        return None
    lowered = Lowered(
        "call",
        value.labels,
        (True, *(False for _ in call.shape[1:])),
        flops=10.0 * math.prod(value.shape),
        precision="lower" if call.name.startswith("conv") else "keep",
    )
    if call.name.startswith("conv"):
        weight: Value = call["weight"]
        lowered.flops = 2.0 * math.prod(value.shape) * math.prod(weight.shape[1:])
    lowered.attributes = {
        "target": str(call.target),
        "arguments": {
            name: lowered.operand(
                v, (Same(0), *whole(v.shape[1:])) if v is value else whole(v.shape), name
            )
            if isinstance(v, Value)
            else v
            for name, v in call.arguments.items()
        },
    }
    return lowered
