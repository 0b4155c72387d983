"""Small data in the formats that public training scripts read, made on the spot.

What is in it is random: the scripts are to train as fast as they do, not to learn.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path

import numpy as np

WORDS = [f"{a}{b}{c}" for a in "bdfkmt" for b in "aeiou" for c in ("n", "r", "st", "l")]


def _generator() -> np.random.Generator:
    return np.random.default_rng(0)


def _idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the format of MNIST's files, unpacked."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.tobytes())


def mnist(folder: Path, train: int = 9600, test: int = 1000) -> None:
    """MNIST's four files as ``torchvision.datasets.MNIST(folder)`` finds them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    generator = _generator()
    for name, count in (("train", train), ("t10k", test)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        _idx(raw / f"{name}-images-idx3-ubyte", images)
        _idx(raw / f"{name}-labels-idx1-ubyte", labels)


def mnist_tensors(folder: Path, train: int, test: int) -> None:
    """The same as tensors, as Lightning's own copy of MNIST is stored."""
    import torch

    place = folder / "MNIST" / "complete"
    place.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("training", train), ("test", test)):
        pixels = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator)
        torch.save((pixels, labels), place / f"{name}.pt")


def images(folder: Path, train: int, test: int, side: int, classes: int = 2) -> None:
    """Folders ``train`` and ``val`` of JPEG files, a folder for each class."""
    from PIL import Image

    generator = _generator()
    for part, count in (("train", train), ("val", test)):
        for place in range(count):
            file = folder / part / f"class{place % classes}" / f"{place}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)


def text(file: Path, words: int, line: int = 12) -> None:
    """Lines of made-up words."""
    generator = random.Random(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        " ".join(generator.choice(WORDS) for _ in range(line)) for _ in range(max(1, words // line))
    )
    file.write_text("\n".join(lines) + "\n")


def names(file: Path, count: int = 2000) -> None:
    """One made-up name a line."""
    generator = random.Random(0)
    lines = ("".join(generator.choice(WORDS) for _ in range(2)) for _ in range(count))
    file.write_text("\n".join(lines) + "\n")


def tokens(folder: Path, count: int = 200_000, vocabulary: int = 65) -> None:
    """``train.bin`` and ``val.bin``, tokens of 16 bits one after the other, and ``meta.pkl``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = _generator()
    for part in ("train", "val"):
        generator.integers(0, vocabulary, count).astype(np.uint16).tofile(folder / f"{part}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))


def mutag(folder: Path, count: int = 320) -> None:
    """Graphs in the text files of TU Dortmund, as its collection MUTAG has them."""
    name = "MUTAG"
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    edges, owners, labels, kinds = [], [], [], []
    first = 1
    for graph in range(1, count + 1):
        size = generator.randint(8, 28)
        for node in range(size):
            other = first + (node + 1) % size
            edges += [f"{first + node}, {other}", f"{other}, {first + node}"]
            owners.append(str(graph))
            kinds.append(str(generator.randrange(7)))
        labels.append(str(generator.choice((-1, 1))))
        first += size
    for part, lines in (
        ("A", edges),
        ("graph_indicator", owners),
        ("graph_labels", labels),
        ("node_labels", kinds),
    ):
        (raw / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")


def causal_model(folder: Path, vocabulary: int = 400) -> None:
    """A Llama of a tenth of a million parameters, with a tokenizer of made-up words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    entries = ["<unk>", "<pad>", "<s>", "</s>", *WORDS][:vocabulary]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(entries)}, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(entries),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def texts_as_json(folder: Path, count: int = 1280) -> None:
    """A data set of texts of uneven length: between 4 and 120 words, most of them short."""
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(count):
            length = 4 + int(116 * generator.random() ** 3)
            line = " ".join(generator.choice(WORDS) for _ in range(length))
            file.write(json.dumps({"text": line}) + "\n")
