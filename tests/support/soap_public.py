"""Small models as public packages write them: where samples used to be lost."""

import torch
from torch import nn
from torch.nn import functional

BATCH = 6


class LanguageModel(nn.Module):
    """Recurrent, as torch's example of word_language_model."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.cells = nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True)
        self.leave = nn.Linear(16, 50)

    def forward(self, tokens):
        states = torch.zeros(2, 2, len(tokens), 16).unbind(0)
        out, _ = self.cells(functional.dropout(self.table(tokens), 0.2), states)
        return self.leave(functional.dropout(out, 0.2))


class Conv1D(nn.Module):
    """Of transformers: a linear layer whose weight has inputs first."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class Gpt2Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        query, key, value = (
            part.view(*x.shape[:2], 2, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=2)
        )
        y = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1, is_causal=True
        )
        x = x + functional.dropout(self.c_proj(y.transpose(1, 2).reshape(x.shape)), 0.1)
        y = self.c_out(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return x + functional.dropout(y, 0.1)


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Gpt2Block(16), Gpt2Block(16))
        self.ln_f = nn.LayerNorm(16)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = functional.dropout(self.wte(tokens) + self.wpe(places), 0.1)
        return functional.linear(self.ln_f(self.blocks(x)), self.wte.weight)


class ViT(nn.Module):
    """As torchvision's: patches, a class token in front, torch's own attention."""

    def __init__(self):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 16, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, 16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 50)

    def forward(self, images):
        x = self.conv_proj(images)
        x = x.reshape(len(images), 16, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), x], dim=1)
        x = x + self.pos_embedding
        y = self.norms[0](x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = functional.dropout(y, 0.1) + x
        x = x + self.feed(self.norms[1](x))
        return self.head(self.norms[2](x)[:, 0])


def words(model, batch):
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


PUBLIC = {"lstm": LanguageModel, "gpt2": Gpt2, "vit": ViT}


def make_public(name):
    """The model, its loss and a batch."""
    torch.manual_seed(5)
    model = PUBLIC[name]()
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 50, (BATCH, 8), generator=generator)
    if name != "vit":
        return model, words, (tokens, tokens.roll(-1, 1))
    images = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return model, words, (images, tokens[:, 0])
