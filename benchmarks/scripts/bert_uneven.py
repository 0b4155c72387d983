"""BERT's masked language modelling by Hugging Face's Trainer, on texts of uneven length.

    python bert_uneven.py --output_dir out --bf16 True --per_device_train_batch_size 64
    python bert_uneven.py ... --attention efficient --torch_compile True

Texts of random tokens, most of them short and a few long as texts are, are padded to the longest of
their batch. Weights are random; nothing is downloaded.
"""

import time
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 30522
    texts: int = 20000
    shortest: int = 32
    longest: int = 256
    attention: str | None = field(
        default=None, metadata={"help": "flash, efficient, cudnn or math; torch picks otherwise"}
    )


class Texts(Dataset):
    def __init__(self, script):
        generator = torch.Generator().manual_seed(0)
        usual = 2.0 * script.shortest
        lengths = usual * torch.randn(script.texts, generator=generator).mul(0.5).exp()
        lengths = lengths.long().clamp(script.shortest, script.longest)
        shape = (int(lengths.sum()),)
        tokens = torch.randint(5, script.vocabulary, shape, generator=generator)
        masked = torch.rand(shape, generator=generator) < 0.15
        self.labels = tokens.where(masked, -100).split(lengths.tolist())
        self.tokens = tokens.masked_fill(masked, 4).split(lengths.tolist())

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def pad(rows):
    tokens = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


class Throughput(TrainerCallback):
    """Says how fast the second half of the steps was."""

    def now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps // 2:
            self.begin = self.now()

    def on_train_end(self, args, state, control, **kwargs):
        seconds, steps = self.now() - self.begin, state.max_steps - state.max_steps // 2
        samples = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        print(f"throughput: {samples / seconds:.2f} samples/s over the last {steps} steps")


def main():
    parser = HfArgumentParser((TrainingArguments, ScriptArguments))
    training, script = parser.parse_args_into_dataclasses()
    if script.attention:
        torch.backends.cuda.enable_flash_sdp(script.attention == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(script.attention == "efficient")
        torch.backends.cuda.enable_cudnn_sdp(script.attention == "cudnn")
    torch.manual_seed(training.seed)
    config = BertConfig(
        vocab_size=script.vocabulary,
        hidden_size=script.hidden_size,
        num_hidden_layers=script.layers,
        num_attention_heads=script.heads,
        intermediate_size=4 * script.hidden_size,
        max_position_embeddings=2 * script.longest,
    )
    trainer = Trainer(
        model=BertForMaskedLM(config),
        args=training,
        train_dataset=Texts(script),
        data_collator=pad,
        callbacks=[Throughput()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
