"""A residual network for images (He et al. 2016), in basic and bottleneck form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from perfsearch.workloads.base import Job
from perfsearch.workloads.data import ImageDataset
from perfsearch.workloads.spec import WorkloadSpec


@dataclass(frozen=True)
class Shape:
    """Blocks of each stage, and their form."""

    stages: tuple[int, ...]
    width: int
    bottleneck: bool
    image_size: int
    classes: int


SIZES = {
    "tiny": Shape((1, 1, 1), 8, False, image_size=32, classes=10),
    "resnet18": Shape((2, 2, 2, 2), 64, False, image_size=224, classes=1000),
    "resnet50": Shape((3, 4, 6, 3), 64, True, image_size=224, classes=1000),
}


class Residual(nn.Module):  # type: ignore[misc]
    """Two or three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * (4 if bottleneck else 1)
        if bottleneck:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            plan = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        layers: list[nn.Module] = []
        for into, out, kernel, step in plan:
            conv = nn.Conv2d(into, out, kernel, step, padding=kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to images."""
        return functional.relu(self.convolutions(x) + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]
    """Stem, stages of residual blocks that halve the image, pooled classifier."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        large = shape.image_size > 64
        kernel, stride = (7, 2) if large else (3, 1)
        stem: list[nn.Module] = [
            nn.Conv2d(3, shape.width, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(shape.width),
            nn.ReLU(),
        ]
        if large:
            stem.append(nn.MaxPool2d(3, 2, padding=1))
        self.stem = nn.Sequential(*stem)
        expansion = 4 if shape.bottleneck else 1
        inputs = shape.width
        blocks: list[nn.Module] = []
        for stage, count in enumerate(shape.stages):
            width = shape.width * 2**stage
            for place in range(count):
                step = 2 if stage and not place else 1
                blocks.append(Residual(inputs, width, step, shape.bottleneck))
                inputs = width * expansion
        self.blocks = nn.ModuleList(blocks)
        self.classify = nn.Linear(inputs, shape.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, height, width) to logits (batch, classes)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.classify(x.mean((2, 3)))
        return logits


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of a batch of images and classes."""
    images, classes = batch
    return functional.cross_entropy(model(images).float(), classes)


def build(spec: WorkloadSpec, seed: int) -> Job:
    """The job; weights come from torch's generator as it stands, data from ``seed``."""
    shape = replace(SIZES[spec.size], **spec.chosen)
    model = ResNet(shape)
    return Job(
        model=model,
        data=ImageDataset(shape.image_size, shape.classes, seed),
        loss=classification_loss,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, weight_decay=1e-4
        ),
        autocast_dtype={"cuda": torch.bfloat16},
        blocks=list(model.blocks),
    )
