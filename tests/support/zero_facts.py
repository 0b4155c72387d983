"""Facts of jobs, without building them."""

from perfsearch.metrics.memory import MemoryFacts, Parameter


def gpt_facts(
    layers, width, vocabulary=50_257, length=1024, activations=None, activations_large=None
):
    """GPT-2's shapes: tied head, twelve parameters a block, as ``workloads.gpt`` builds them."""
    parameters = [Parameter((vocabulary, width), 4), Parameter((length, width), 4)]
    for block in range(layers):
        matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        vectors = [width] * 4 + [3 * width, width, 4 * width, width]
        parameters += [Parameter(shape, 4, True, block) for shape in matrices]
        parameters += [Parameter((size,), 4, True, block) for size in vectors]
    parameters += [Parameter((width,), 4), Parameter((width,), 4)]
    return MemoryFacts(
        tuple(parameters),
        blocks=layers,
        block_class="Block",
        cast_bytes=2,
        activations=activations or {},
        activations_large=activations_large or activations or {},
    )


def gpt_large(logits_kept=False):
    """The model of ``data/zero_gpt2large_4xh100.csv``; activations as traced on ``meta``.

    Args:
        logits_kept: as in the program that measured those rows, whose loop holds the logits (bf16)
            until the backward pass has ended; they are no argument of a function that has returned.

    """
    logits = 1024 * 50_257 * 2.0 if logits_kept else 0.0

    def lines(kept):
        return {kind: (fixed, growth + logits) for kind, (fixed, growth) in kept.items()}

    small = {
        "autocast/0": (1544243720.0, 2327662592.0),
        "autocast/1": (1545056776.0, 711264256.0),
        "policy/0": (8200.0, 2136297472.0),
        "policy/1": (8200.0, 717180928.0),
    }
    large = {**small, "autocast/1": (128666120.0, 814174208.0)}
    return gpt_facts(36, 1280, activations=lines(small), activations_large=lines(large))


class GivenFacts:
    """In place of ``FactsSource``: the answer is there."""

    error = ""

    def __init__(self, facts):
        self._facts = facts

    def start(self):
        pass

    def get(self):
        return self._facts

    def close(self):
        pass
