"""The micro-batch and the accumulation among a script's own options, as its source declares them.

The source is read, never run. No torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perfsearch.core.knob import Value
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.transport import HF_BATCH, Mapped, current

_OF_A_PASS = {
    "device_batch_size",
    "mbs",
    MICRO_BATCH.name,
    "micro_batch_size",
    "microbatch",
    "microbatch_size",
    "per_device_batch_size",
    "per_device_train_batch_size",
    "per_gpu_batch_size",
    "per_gpu_train_batch_size",
    "train_micro_batch_size_per_gpu",
}
"""Options that say how many samples a rank's pass has."""

_OF_A_PASS_OR_A_STEP = {"batch", "batch_size", "bs", "bsz", "train_batch", "train_batch_size"}
"""Options that say so in some scripts, and in others how many a step has."""

_OF_A_STEP = {
    "effective_batch_size",
    "gbs",
    "global_batch",
    "global_batch_size",
    "total_batch_size",
}
"""Options by which a script works out one of the two from the other."""

_PASSES = {
    "accum_grad",
    "accum_iter",
    "accum_steps",
    "accumulate",
    "accumulate_grad_batches",
    "accumulate_steps",
    "accumulation",
    "accumulation_steps",
    "grad_acc",
    "grad_acc_steps",
    "grad_accum",
    "grad_accum_steps",
    "grad_accumulation",
    "grad_accumulation_steps",
    ACCUMULATION.name,
    "gradient_accumulation_steps",
    "update_freq",
}
"""Options that say how many passes a step has."""


@dataclass(frozen=True)
class BatchArguments:
    """Where a script takes its micro-batch and its accumulation from, as far as its source tells.

    Attributes:
        maps: of both knobs, or none.
        is_certain: whether the names themselves say that the batch is that of a pass.
        micro_batch: today's, if the batch is that of a pass.
        accumulation: today's.

    """

    maps: tuple[Mapped, ...] = ()
    is_certain: bool = False
    micro_batch: int = 0
    accumulation: int = 0

    @property
    def share(self) -> int:
        """Samples that a rank trains a step today, if the batch is that of a pass."""
        return self.micro_batch * self.accumulation

    def __str__(self) -> str:
        return " and ".join(f"{mapped.name} ({mapped})" for mapped in self.maps)


def batch_arguments(script: str, arguments: Sequence[str]) -> BatchArguments:
    """Both options, where a script declares each once and today's values are known.

    Args:
        script: its path; anything that is no readable Python file has none.
        arguments: its own.

    """
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return BatchArguments()
    options = [option for option in _declared(tree) if option.names]
    found = [
        [option for option in options if option.names & known]
        for known in (_OF_A_PASS, _OF_A_PASS_OR_A_STEP, _PASSES, _OF_A_STEP)
    ]
    of_a_pass, of_either, passes, of_a_step = found
    maps: list[Mapped | None] = []
    if _uses_hf_arguments(tree):
        maps = list(HF_BATCH) if not (of_a_pass or of_either or passes) else []
    elif not of_a_step and len(of_a_pass) + len(of_either) == len(passes) == 1:
        (batch,), (accumulation,) = of_a_pass or of_either, passes
        maps = [
            batch.mapped(MICRO_BATCH.name, arguments),
            accumulation.mapped(ACCUMULATION.name, arguments),
        ]
    known = tuple(mapped for mapped in maps if mapped is not None)
    if _gives_values_elsewhere(tree, {_name_of(mapped.argument) for mapped in known}):
        known = tuple(replace(mapped, default=None) for mapped in known)
    values = [current(arguments, mapped) for mapped in known]
    today = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    if len(today) != 2:
        return BatchArguments()
    return BatchArguments(known, not of_either, *today)


@dataclass(frozen=True)
class _Option:
    """One call of ``add_argument``: its option strings, and the default if it is a plain value."""

    words: tuple[str, ...]
    default: Value
    is_plain: bool

    @property
    def names(self) -> set[str]:
        """Of its long forms, as the parser has them."""
        long = [word for word in self.words if word.startswith("--")]
        return {_name_of(word) for word in long}

    def mapped(self, name: str, arguments: Sequence[str]) -> Mapped | None:
        """The knob's place; ``None`` where it is not plain what the parser makes of the words."""
        heads = [argument.partition("=")[0] for argument in arguments]
        given = [word for word in self.words if word in heads]
        others = [head for head in heads if head not in self.words and self._may_be(head)]
        if not self.is_plain or others or len(given) > 1:
            return None
        long = next(word for word in self.words if word.startswith("--"))
        return Mapped(name, argument=given[0] if given else long, default=self.default)

    def _may_be(self, head: str) -> bool:
        """Whether a parser may take an argument for this option: cut short, or with its value."""
        if head.startswith("--"):
            return any(word.startswith(head) for word in self.words) and len(head) > len("--")
        short = [word for word in self.words if not word.startswith("--")]
        return any(head.startswith(word) for word in short)


def _name_of(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def _gives_values_elsewhere(tree: ast.AST, names: set[str]) -> bool:
    """Whether the source may give options other values than their defaults and the words."""
    stored = {
        node.attr.lower()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    others = {"set_defaults", "parse_json_file", "parse_yaml_file", "parse_dict"}
    return bool(stored & names or called & others)


def _declared(tree: ast.AST) -> Iterator[_Option]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        words = tuple(a.value for a in node.args if isinstance(a, ast.Constant))
        texts = tuple(word for word in words if isinstance(word, str) and word.startswith("-"))
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        default = given.get("default")
        value = default.value if isinstance(default, ast.Constant) else None
        is_plain = not given.keys() & {"action", "choices", "nargs", None}
        yield _Option(texts, value if isinstance(value, int) else None, is_plain)


def _uses_hf_arguments(tree: ast.AST) -> bool:
    """Whether the Trainer's own options are parsed, with the defaults that it has."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
    }
    parsed = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "HfArgumentParser"
        for whole in node.args
        for argument in (whole.elts if isinstance(whole, ast.Tuple | ast.List) else [whole])
        if isinstance(argument, ast.Name)
    }
    return "HfArgumentParser" in imported and "TrainingArguments" in imported & parsed
