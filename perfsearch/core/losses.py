"""How finely a loss can be told."""

_STEPS = {"bfloat16": 2**-7, "float16": 2**-10}
"""From one number to the next that a half-precision type has, relative to them."""


def resolution(dtype: str) -> float:
    """How far apart losses of a type may be, relative to their size, though nothing differs.

    Each micro-batch's loss is rounded to the type, by half a step up or down; micro-batches of
    another size have other losses, which are rounded elsewhere.

    Args:
        dtype: torch's name of it, such as ``bfloat16``; 0 for one that is not known to be coarse.

    """
    return _STEPS.get(dtype, 0.0)
