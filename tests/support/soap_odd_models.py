"""Models with functions that have no rule, a rule in some forms only, or an unusual loss."""

from functools import partial

import torch
from support.soap_odd_layers import MIDDLES
from torch import nn
from torch.nn import functional

BATCH, WIDTH = 7, 8


class _Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.leave(self.middle(torch.tanh(self.enter(x))))


class Between(_Layered):
    """With what ``MIDDLES`` has under a name."""

    def __init__(self, name):
        super().__init__()
        self.function, parts = MIDDLES[name]
        for part, make in parts.items():
            setattr(self, part, make())

    def middle(self, x):
        return self.function(self, x)


class Recurrent(_Layered):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(2, 2, batch_first=True)

    def middle(self, x):
        return self.cell(x.view(-1, 4, 2))[0].flatten(1)


class Gated(_Layered):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.slope = nn.Parameter(torch.rand(WIDTH))
        self.norm = nn.RMSNorm(WIDTH)

    def middle(self, x):
        a, b = self.wide(x).chunk(2, -1)
        y = functional.silu(a) * b
        y += x * self.slope
        y = torch.where(y > 0, y, 0.1 * y)
        return self.norm(functional.normalize(y, dim=-1))


class Query(_Layered):
    """A learned token, a weight used transposed, an expression of parameters alone."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Parameter(torch.randn(4, 4))

    def middle(self, x):
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x.view(-1, 2, 4)], 1)
        scores = tokens @ self.weight.t() @ torch.softmax(self.other, -1)
        mixed = torch.einsum("bij,bkj->bik", scores, tokens)
        return torch.cat([mixed.flatten(1)[:, :5], mixed[:, 0, :3].cumsum(-1)], 1)


class Images(_Layered):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 2, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.fixed = nn.BatchNorm2d(4).eval()
        self.down = nn.Conv2d(4, 2, 3, padding="same", padding_mode="zeros")
        self.pool = nn.AdaptiveAvgPool2d((2, 2))

    def middle(self, x):
        y = self.norm(self.up(x.view(-1, 2, 2, 2)))
        y = functional.avg_pool2d(functional.leaky_relu_(self.fixed(y), 0.2), 3, 1, 1)
        return self.pool(self.down(y)).flatten(1)


class Ready(_Layered):
    """torch's own attention module, and its transformer layer with dropout."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def middle(self, x):
        y = x.view(-1, 2, 4)
        y = y + self.attend(y, y, y, need_weights=False)[0]
        return self.layer(y).flatten(1)


class Rotated(_Layered):
    """Rotary positions: slices, negation, buffers; a mask; attention by rows of queries."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1])).double()
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        self.register_buffer("mask", torch.randn(4, 4).double())

    def middle(self, x):
        y = x.view(-1, 1, 4, 2)
        first, second = y[..., 0::2], y[..., 1::2]
        cosine, sine = self.cosine[:, :1], self.sine[:, :1]
        y = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1)
        y = y.flatten(-2)
        return functional.scaled_dot_product_attention(y, y, y, self.mask).flatten(1)


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 4, mode="mean")
        self.padded = nn.Embedding(9, 4, padding_idx=2)
        self.leave = nn.Linear(8, 3)

    def forward(self, x):
        indices = (x.abs() * 10).long() % 9
        ends = torch.tensor([0, 3, 4, 11, 20, 25, 40], device=x.device)
        bags = self.bags(indices.flatten(), ends)
        return self.leave(torch.cat([bags, self.padded(indices).mean(1)], 1))


class Rare(nn.Module):
    """Tables with gradients of a form of their own, a made weight, a part without gradient."""

    in_place = True
    """Whether its dropout is; not on GPUs, where another kernel may draw other numbers for that."""

    def __init__(self):
        super().__init__()
        self.weighted = nn.EmbeddingBag(9, 4, mode="sum")
        self.most = nn.EmbeddingBag(9, 4, mode="max")
        self.sparse = nn.Embedding(9, 4, sparse=True)
        self.scaled = nn.Embedding(9, 4, scale_grad_by_freq=True)
        self.made = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4))
        self.weight = nn.Parameter(torch.randn(20, 3))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        indices = (x.abs() * 10).long() % 9
        parts = [
            self.weighted(indices, per_sample_weights=x),
            self.most(indices),
            self.sparse(indices).mean(1),
            self.scaled(indices).mean(1),
            functional.dropout(functional.hardswish(self.made(x)), 0.1, inplace=self.in_place),
        ]
        with torch.no_grad():
            known = torch.tanh(parts[0])
        parts[1] = parts[1] * known
        return torch.addmm(self.bias, torch.cat(parts, 1), self.weight, beta=0.5)


def squared(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def two_terms(model, batch):
    out = model(batch[0])
    return functional.l1_loss(out, batch[1]) + 0.1 * out.pow(2).mean()


def by_hand(model, batch):
    return (model(batch[0]) - batch[1]).square().sum()


def weighted(model, batch):
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64, device=batch[0].device)
    classes = (batch[1][:, 0].abs() * 10).long() % 3
    return -(functional.cross_entropy(model(batch[0]), classes, weight) * 3.0 / 2).double()


def likelihood(model, batch):
    classes = (batch[1][:, 0].abs() * 10).long() % 3
    return functional.nll_loss(model(batch[0]).log_softmax(1), classes, reduction="sum")


ODD = {
    **{name: (partial(Between, name), squared) for name in MIDDLES},
    "recurrent": (Recurrent, squared),
    "gated": (Gated, two_terms),
    "query": (Query, by_hand),
    "images": (Images, weighted),
    "ready": (Ready, likelihood),
    "rotated": (Rotated, squared),
    "ragged": (Ragged, by_hand),
    "rare": (Rare, squared),
}


def make_odd(name, steps):
    kind, loss = ODD[name]
    torch.manual_seed(5)
    model = kind().double()
    generator = torch.Generator().manual_seed(7)

    def normal(width):
        return torch.randn(BATCH, width, generator=generator, dtype=torch.float64)

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return model, loss, optimizer, [(normal(WIDTH), normal(3)) for _ in range(steps)]
