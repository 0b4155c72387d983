"""Small models of each kind, in float64, with a batch that does not divide evenly."""

import torch
from support.soap_odd_models import ODD, make_odd
from torch import nn
from torch.nn import functional

BATCH = 13


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.hidden = nn.Linear(10, 7, bias=False)
        self.leave = nn.Linear(7, 3)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return self.leave(torch.tanh(self.hidden(x)) * 0.7)


class Dlrm(nn.Module):
    """With bags of one and of several, and a ragged one."""

    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 6, mode="sum") for _ in range(3))
        self.rows = nn.Embedding(11, 6)
        self.top = nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        pairs = torch.tril_indices(5, 5, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, dense, indices):
        x = self.bottom(dense)
        vectors = [x, *(t(indices[:, i, :]) for i, t in enumerate(self.tables))]
        vectors.append(self.rows(indices[:, 0, 0] % 11))
        stacked = torch.stack(vectors, 1)
        crossed = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([*vectors[:-1], crossed[:, :2], vectors[-1], crossed[:, 2:6]], 1))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.third = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.classify = nn.Linear(6, 5)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu_(self.norm(self.first(x))), 3, 2, 1)
        y = self.second(x)
        y = functional.gelu(self.third(y)) + self.depth(y)
        y = functional.avg_pool2d(y, 2)
        return self.classify(y.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width, heads, drop):
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm = nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        # its bias would have no gradient but rounding, which cannot be compared
        self.key = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        h = self.norm(x)

        def split(y):
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.query(h)), split(self.key(h)), split(self.value(h))
        drop = self.drop if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + functional.dropout(self.feed(x), self.drop, self.training)


class Transformer(nn.Module):
    """A head tied to the embedding, one fused projection, attention written out."""

    def __init__(self, drop=0.1, length=5, width=8, heads=4, vocabulary=11):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, drop) for _ in range(1))
        self.fused = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.heads = heads

    def forward(self, tokens):
        x = functional.dropout(self.tokens(tokens) + self.places, 0.2, self.training)
        for block in self.blocks:
            x = block(x)
        batch, length, _ = x.shape
        parts = self.fused(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scores = (q @ k.transpose(-2, -1) / 2.0).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).flatten(2)
        return self.head(self.norm(x))


def mlp_loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def dlrm_loss(model, batch):
    dense, indices, clicks = batch
    return functional.binary_cross_entropy(model(dense, indices).squeeze(1), clicks)


def class_loss(model, batch):
    images, labels = batch
    return functional.cross_entropy(model(images), labels, label_smoothing=0.1)


def token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.2)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def _batch(name, generator):
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def whole(high, *shape):
        return torch.randint(high, shape, generator=generator)

    return {
        "mlp": lambda: (normal(BATCH, 6), normal(BATCH, 3)),
        "dlrm": lambda: (
            normal(BATCH, 5),
            whole(20, BATCH, 3, 2),
            torch.rand(BATCH, generator=generator).double(),
        ),
        "tables": lambda: _batch("dlrm", generator),
        "conv": lambda: (normal(BATCH, 3, 13, 13), whole(5, BATCH)),
        "transformer": lambda: whole(11, BATCH, 6),
    }[name]()


MODELS = {
    "mlp": (Mlp, mlp_loss, adam),
    "dlrm": (Dlrm, dlrm_loss, sgd),
    "tables": (Dlrm, dlrm_loss, descent),
    "conv": (Conv, class_loss, sgd),
    "transformer": (Transformer, token_loss, sgd),
}


def make(name, steps=3):
    """Model, loss, optimizer factory and a batch for each step, from one seed."""
    if name in ODD:
        return make_odd(name, steps)
    kind, loss, optimizer = MODELS[name]
    torch.manual_seed(5)
    model = kind().double().train()
    generator = torch.Generator().manual_seed(7)
    return model, loss, optimizer, [_batch(name, generator) for _ in range(steps)]
