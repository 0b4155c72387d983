"""Models of public packages at small settings of their own, with random weights and data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH = 6
WORDS, LENGTH, CLASSES = 50, 12, 10


@dataclass(frozen=True)
class Case:
    """A model of a package, and what it is given.

    Attributes:
        package: that it is imported from.
        name: of the class or function there.
        options: its own.
        task: what data and loss it gets.
        size: edge of its images in pixels.
        variant: what it is called with these options.

    """

    package: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    task: str = "images"
    size: int = 32
    variant: str = ""

    @property
    def key(self) -> str:
        """For tables and files."""
        return f"{self.package} {self.variant or self.name}"

    def make(self) -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor]]:
        """The model, in float64 and in training, and its loss."""
        torch.manual_seed(5)
        model = MAKERS[self.package](self.name, self.options).double().train()
        return model, LOSSES[self.task]

    def batch(self, seed: int) -> tuple[torch.Tensor, ...]:
        """A batch; another seed gives another."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        words = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
        draw = {"generator": generator, "dtype": torch.float64}
        if self.task == "images" or self.task == "image_output":
            return torch.randn(BATCH, 3, self.size, self.size, **draw), labels
        if self.task == "pixels":
            shape = (BATCH, self.size, self.size)
            marks = torch.randint(0, CLASSES, shape, generator=generator)
            return torch.randn(BATCH, 3, self.size, self.size, **draw), marks
        if self.task == "video":
            return torch.randn(BATCH, 3, 4, self.size, self.size, **draw), labels
        if self.task == "class_of_words":
            return words, labels
        if self.task == "pair":
            return words, words.flip(1), words.roll(-1, 1)
        if self.task == "waves":
            return torch.randn(BATCH, 800, **draw), labels
        if self.task == "image_and_words":
            return torch.randn(BATCH, 3, self.size, self.size, **draw), words, labels
        return words, words.roll(-1, 1)


def _of_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    import torchvision.models as models

    for place in (models, models.segmentation, models.video):
        if hasattr(place, name):
            made: nn.Module = getattr(place, name)(**_settled(options))
            return made
    raise ValueError(name)


def _settled(options: dict[str, Any]) -> dict[str, Any]:
    """Options, of which those that need an object of the package are functions."""
    return {k: v() if callable(v) else v for k, v in options.items()}


def _of_timm(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    if "." in name:
        module, _, kind = name.partition(".")
        place = importlib.import_module(f"timm.models.{module}")
        made: nn.Module = getattr(place, kind)(**_settled(options))
        return made
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


def _of_transformers(name: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**options))
    return model


MAKERS = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers}


def _classes(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    if isinstance(out, tuple | list):  # several heads
        return sum((functional.cross_entropy(head, batch[1]) for head in out), torch.zeros(()))
    return functional.cross_entropy(out, batch[1])


def _pixels(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0])["out"], batch[1])


def _logits(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).logits, batch[1])


def _next_word(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _pair(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch[0], decoder_input_ids=batch[1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten())


def _similar(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(pixel_values=batch[0], input_ids=batch[1])
    places = torch.arange(BATCH)
    return functional.cross_entropy(out.logits_per_image, places)


LOSSES = {
    "images": _classes,
    "pixels": _pixels,
    "video": _classes,
    "image_output": _logits,
    "class_of_words": _logits,
    "next_word": _next_word,
    "pair": _pair,
    "waves": _logits,
    "image_and_words": _similar,
}


# -----------------------------------------------------------------------------
# The models.


def _cn_blocks() -> Any:
    from torchvision.models.convnext import CNBlockConfig

    return [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]


def _mb_blocks() -> Any:
    from torchvision.models.efficientnet import MBConvConfig

    return [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 16, 2)]


def _basic_block() -> Any:
    from torchvision.models.resnet import BasicBlock

    return BasicBlock


def _bottleneck() -> Any:
    from torchvision.models.resnet import Bottleneck

    return Bottleneck


def _regnet_blocks() -> Any:
    from torchvision.models.regnet import BlockParams

    return BlockParams.from_init_params(
        depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25
    )


_V = "torchvision"
_TORCHVISION = [
    Case(_V, "resnet18", {"num_classes": CLASSES}),
    Case(_V, "ResNet", {"block": lambda: _bottleneck(), "layers": [1, 1, 1, 1], "groups": 4,
                        "width_per_group": 4, "num_classes": CLASSES}),
    Case(_V, "mobilenet_v2", {"width_mult": 0.2, "num_classes": CLASSES}, size=64),
    Case(_V, "mobilenet_v3_small", {"width_mult": 0.25, "num_classes": CLASSES}, size=64),
    Case(_V, "MNASNet", {"alpha": 0.25, "num_classes": CLASSES}, size=64),
    Case(_V, "DenseNet", {"growth_rate": 4, "block_config": (2, 2, 2), "num_init_features": 8,
                          "num_classes": CLASSES, "drop_rate": 0.1}),
    Case(_V, "shufflenet_v2_x0_5", {"num_classes": CLASSES}, size=64),
    Case(_V, "squeezenet1_1", {"num_classes": CLASSES}),
    Case(_V, "googlenet", {"num_classes": CLASSES, "aux_logits": False, "init_weights": False}),
    Case(_V, "EfficientNet", {"inverted_residual_setting": _mb_blocks, "dropout": 0.2,
                              "last_channel": 32, "num_classes": CLASSES}),
    Case(_V, "RegNet", {"block_params": _regnet_blocks, "num_classes": CLASSES,
                        "stem_width": 8}),
    Case(_V, "ConvNeXt", {"block_setting": _cn_blocks, "stochastic_depth_prob": 0.1,
                          "num_classes": CLASSES}),
    Case(_V, "VisionTransformer", {"image_size": 32, "patch_size": 8, "num_layers": 2,
                                   "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64,
                                   "dropout": 0.1, "num_classes": CLASSES}),
    Case(_V, "SwinTransformer", {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 1],
                                 "num_heads": [1, 2], "window_size": [4, 4],
                                 "num_classes": CLASSES}),
    Case(_V, "MaxVit", {"input_size": (32, 32), "stem_channels": 8, "partition_size": 2,
                        "block_channels": [8, 16], "block_layers": [1, 1], "head_dim": 8,
                        "stochastic_depth_prob": 0.1, "num_classes": CLASSES}),
    Case(_V, "lraspp_mobilenet_v3_large", {"weights_backbone": None, "num_classes": CLASSES},
         "pixels"),
]  # fmt: skip


def _of_mixer(name: str) -> Callable[[], Any]:
    def found() -> Any:
        from timm.models import mlp_mixer

        return getattr(mlp_mixer, name)

    return found


_T = "timm"
_MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2,
          "num_classes": CLASSES}  # fmt: skip
_TIMM = [
    Case(_T, "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 32,
                                      "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}),
    Case(_T, "deit_tiny_distilled_patch16_224", {"img_size": 32, "patch_size": 8,
                                                 "embed_dim": 32, "depth": 2, "num_heads": 2}),
    Case(_T, "swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 4, "embed_dim": 16,
                                              "depths": (2, 1), "num_heads": (1, 2)}),
    Case(_T, "mlp_mixer.MlpMixer", _MIXER),
    Case(_T, "mlp_mixer.MlpMixer", {**_MIXER, "block_layer": _of_mixer("ResBlock"),
                                    "norm_layer": _of_mixer("Affine"), "mlp_ratio": 4},
         variant="ResMLP"),
    Case(_T, "mlp_mixer.MlpMixer", {**_MIXER, "block_layer": _of_mixer("SpatialGatingBlock"),
                                    "mlp_layer": _of_mixer("GatedMlp"), "mlp_ratio": 6},
         variant="gMLP"),
    Case(_T, "convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16),
                               "drop_path_rate": 0.1}),
    Case(_T, "convmixer.ConvMixer", {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 4,
                                     "num_classes": CLASSES}),
    Case(_T, "cait_xxs24_224", {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2,
                                "num_heads": 2}),
    Case(_T, "beit_base_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 32,
                                       "depth": 2, "num_heads": 2}),
    Case(_T, "metaformer.MetaFormer", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16),
                                       "num_classes": CLASSES}, variant="PoolFormer"),
    Case(_T, "xcit_nano_12_p8_224", {"img_size": 32, "embed_dim": 32, "depth": 1,
                                     "num_heads": 2}),
    Case(_T, "pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16),
                           "num_heads": (1, 1, 2, 2)}),
    Case(_T, "ghostnet_050"),
    Case(_T, "efficientnet_lite0", {"drop_path_rate": 0.1}, size=64),
    Case(_T, "mobilevit_xxs", {}, size=64),
]  # fmt: skip

_H = "transformers"
_BERT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
_LLAMA = {**_BERT, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": None}
_LABELS = {"num_labels": CLASSES}
_TRANSFORMERS = [
    Case(_H, "BertForSequenceClassification", {**_BERT, **_LABELS}, "class_of_words"),
    Case(_H, "RobertaForMaskedLM", {**_BERT, "pad_token_id": 0}, "next_word"),
    Case(_H, "DistilBertForSequenceClassification",
         {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64,
          "max_position_embeddings": 32, **_LABELS}, "class_of_words"),
    Case(_H, "AlbertForMaskedLM", {**_BERT, "embedding_size": 16}, "next_word"),
    Case(_H, "ElectraForMaskedLM", {**_BERT, "embedding_size": 16}, "next_word"),
    Case(_H, "DebertaV2ForMaskedLM",
         {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "next_word"),
    Case(_H, "GPT2LMHeadModel",
         {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2,
          "use_cache": False}, "next_word"),
    Case(_H, "GPTNeoXForCausalLM", {**_BERT, "use_cache": False}, "next_word"),
    Case(_H, "OPTForCausalLM",
         {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "ffn_dim": 64, "max_position_embeddings": 32,
          "word_embed_proj_dim": 32, "use_cache": False}, "next_word"),
    Case(_H, "BloomForCausalLM",
         {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 2,
          "use_cache": False}, "next_word"),
    Case(_H, "LlamaForCausalLM", _LLAMA, "next_word"),
    Case(_H, "MistralForCausalLM", _LLAMA, "next_word"),
    Case(_H, "Qwen2ForCausalLM", _LLAMA, "next_word"),
    Case(_H, "GemmaForCausalLM", {**_LLAMA, "head_dim": 16}, "next_word"),
    Case(_H, "PhiForCausalLM", {**_LLAMA, "num_key_value_heads": 2}, "next_word"),
    Case(_H, "MixtralForCausalLM",
         {**_LLAMA, "num_local_experts": 4, "experts_implementation": "batched_mm"}, "next_word"),
    Case(_H, "T5ForConditionalGeneration",
         {"vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
          "num_heads": 2, "use_cache": False}, "pair"),
    Case(_H, "BartForConditionalGeneration",
         {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
          "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
          "decoder_ffn_dim": 64, "max_position_embeddings": 32, "use_cache": False}, "pair"),
    Case(_H, "ViTForImageClassification",
         {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "intermediate_size": 64, **_LABELS}, "image_output"),
    Case(_H, "Wav2Vec2ForSequenceClassification",
         {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 4),
          "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4,
          "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
          "classifier_proj_size": 16, **_LABELS}, "waves"),
    Case(_H, "MambaForCausalLM",
         {"vocab_size": WORDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1,
          "use_cache": False}, "next_word"),
    Case(_H, "FNetForMaskedLM", _BERT, "next_word"),
    Case(_H, "CLIPModel",
         {"projection_dim": 16,
          "text_config": {**_BERT, "eos_token_id": WORDS - 1},
          "vision_config": {"image_size": 32, "patch_size": 8, "hidden_size": 32,
                            "num_hidden_layers": 1, "num_attention_heads": 2,
                            "intermediate_size": 64}}, "image_and_words"),
]  # fmt: skip

CASES = [*_TORCHVISION, *_TIMM, *_TRANSFORMERS]
