"""What public models put between two linear layers: several outputs, random numbers, routing."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 8


def recurrent(kind, outputs, **keywords):
    """A recurrent layer of which several outputs are used."""

    def middle(model, x):
        out, state = model.cell(x.view(-1, 4, 2) if kind is not nn.GRU else x.view(-1, 2, 4))
        state = state if isinstance(state, tuple) else (state,)
        found = [out.flatten(1), *(s.transpose(0, 1).flatten(1) for s in state)]
        mixed = torch.cat([found[i] for i in outputs], 1)
        return (
            functional.pad(mixed, (0, WIDTH - mixed.shape[1]))
            if mixed.shape[1] < WIDTH
            else (mixed[:, :WIDTH] + mixed[:, -WIDTH:])
        )

    width = 4 if kind is nn.GRU else 2
    return middle, {"cell": lambda: kind(width, width, batch_first=True, **keywords)}


def time_first(model, x):
    out, (hidden, _) = model.cell(x.view(-1, 4, 2).transpose(0, 1))
    return functional.dropout((out - hidden[-1:]).transpose(0, 1).flatten(1), 0.3)


def with_state(model, x):
    start = torch.tanh(x[:, :4]).view(2, -1, 2)
    out, hidden = model.cell(x.view(-1, 4, 2), start)
    return out.flatten(1) + hidden.sum()


def cells(model, x):
    hidden, memory = torch.zeros(2, len(x), 4).double().to(x.device)
    for step in x.view(-1, 4, 2).unbind(1):
        hidden, memory = model.cell(step, (hidden, memory))
    return torch.cat([hidden, memory], 1)


def gru_cells(model, x):
    hidden = x
    for _ in range(2):
        hidden = model.cell(x, hidden)
    return hidden


def plain_cells(model, x):
    hidden = torch.tanh(x[:, :4])
    for step in x.view(-1, 4, 2).unbind(1):
        hidden = model.cell(step, model.other_cell(step, hidden))
    return torch.cat([hidden, -hidden], 1)


def last_hidden(model, x):
    """A cell of whose outputs one is used, and one whose memory alone is."""
    start = (torch.tanh(x), torch.sigmoid(x))
    hidden, _ = model.cell(x, start)
    _, memory = model.cell(hidden, start)
    return memory


def decoder(model, x):
    """As of translation: attention over what was read, then a cell, over and over."""
    keys = x.view(-1, 4, 2)
    hidden, memory = model.inner(x)[:, :6], torch.tanh(x[:, :6])
    outputs = []
    for _ in range(2):
        scores = torch.bmm(keys, (hidden @ model.read)[:, :, None]).softmax(1)
        hidden, memory = model.cell((keys * scores).sum(1), (hidden, memory))
        outputs.append(hidden[:, :4])
    return torch.cat(outputs, 1)


def gated_graph(model, x):
    """As of graphs: what neighbours say is read by a cell, whose state is the node's."""
    nodes = x
    ring = torch.arange(len(x), device=x.device).roll(1)
    for _ in range(2):
        heard = torch.zeros_like(nodes).index_add(0, ring, model.inner(nodes))
        nodes = model.cell(heard, nodes)
    return nodes


def penalised_cell(model, x):
    """The weights of a cell are read by something else, too."""
    hidden = model.cell(x, torch.tanh(x))
    return hidden + model.cell.weight_hh.square().mean() * x


def normalised_cell(model, x):
    """The weights of a cell are computed."""
    return model.cell(x, torch.tanh(x))


def quantised(model, x):
    """As of a codebook: the nearest row, with the gradient of what it stands for."""
    y = x.view(-1, 2, 4)
    gaps = (y[:, :, None] - model.codes.weight).square().sum(-1)
    code = model.codes(gaps.argmin(-1))
    straight = y + (code - y).detach()
    return (straight + 0.1 * (code - y.detach())).flatten(1)


def shifted_scores(model, x):
    """As of relative positions: rows of scores are shifted by padding and a reshape."""
    y = x.view(-1, 1, 4, 2)
    scores = y @ model.positions.t()
    count, heads, rows, columns = scores.shape
    padded = functional.pad(scores, (1, 0)).view(count, heads, columns + 1, rows)
    shifted = padded[:, :, 1:].reshape(count, heads, rows, columns)
    return ((y @ y.transpose(-2, -1) + shifted[..., :4]).softmax(-1) @ y).flatten(1)


def made_weights(model, x):
    """As of a hyper-network: each sample has a layer of its own."""
    weights = model.wide(x).view(-1, WIDTH, WIDTH)
    return torch.tanh(torch.bmm(weights, x[:, :, None])).squeeze(2)


def coupled(model, x):
    """As of a flow: a half is scaled by what the other one says, and the scales are counted."""
    fixed, moved = x.chunk(2, 1)
    scale, shift = torch.tanh(model.inner(torch.cat([fixed, fixed], 1))).chunk(2, 1)
    out = torch.cat([moved * scale.exp() + shift, fixed], 1)
    return out + scale.sum(1, keepdim=True)


def best_paths(model, x):
    """As of a conditional random field: sums over all paths, a step at a time."""
    steps = x.view(-1, 2, 4)
    total = steps[:, 0]
    for step in steps[:, 1:].unbind(1):
        total = torch.logsumexp(total[:, :, None] + model.inward, 1) + step
    return x - torch.logsumexp(total, 1, keepdim=True)


def routed_capsules(model, x):
    votes = torch.einsum("bid,kde->bike", x.view(-1, 2, 4), model.experts[:, :4, :2])
    logits = torch.zeros_like(votes[..., :1])
    for _ in range(2):
        joint = (logits.softmax(2) * votes).sum(1, keepdim=True)
        length = joint.square().sum(-1, keepdim=True)
        joint = joint * length.sqrt() / (1 + length)
        logits = logits + (votes * joint).sum(-1, keepdim=True)
    return joint.flatten(1)


def excited(model, x):
    """Channels are weighed by what is in them."""
    y = x.view(-1, 2, 2, 2)
    weight = functional.hardsigmoid(model.squeeze(functional.adaptive_avg_pool2d(y, 1)))
    return (y * weight).flatten(1) + functional.interpolate(y, scale_factor=2).amax((2, 3)).repeat(
        1, 4
    )


def triples(model, x):
    """An anchor, one that is like it and one that is not, by one layer."""
    anchor, near, far = (functional.normalize(model.inner(y), dim=1) for y in (x, -x, x.flip(0)))
    margin = (anchor - near).norm(dim=1) - (anchor - far).norm(dim=1) + 1.0
    return x * functional.relu(margin)[:, None]


def drop_path(model, x):
    kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
    kept.div_(0.7)
    return x + model.inner(x) * kept


def channels_dropped(model, x):
    y = functional.dropout2d(x.view(-1, 2, 2, 2), 0.4)
    return functional.dropout(y.flatten(1), 0.1) + functional.dropout1d(
        x.view(-1, 4, 2), 0.4
    ).flatten(1)


def gumbel(model, x):
    return functional.gumbel_softmax(x, tau=0.7) * x + functional.dropout(x, 0.2)


def gumbel_hard(model, x):
    return functional.gumbel_softmax(x.view(-1, 2, 4), hard=True).flatten(1) * x


def sampled_code(model, x):
    mean, spread = model.inner(x), torch.tanh(x)
    return mean + torch.randn_like(spread) * torch.exp(0.5 * spread)


def noisy(model, x):
    noise = torch.rand(len(x), 1, dtype=x.dtype, device=x.device)
    level = torch.randint(0, 5, (len(x),), device=x.device)
    return x + noise * torch.randn_like(x) + model.table(level)


def random_permuted(model, x):
    return x[:, torch.randperm(WIDTH, device=x.device)] + torch.rand_like(x.t()).t()


def chances(model, x):
    return x * torch.bernoulli(torch.sigmoid(x)) + torch.bernoulli(torch.full_like(x, 0.3))


def unused_draws(model, x):
    torch.randn_like(x)
    torch.rand(3)
    return functional.dropout(x, 0.5)


def drawn_in_place(model, x):
    made = torch.empty_like(x.view(-1, 2, 4).transpose(1, 2)).uniform_(-1, 1)
    made.add_(torch.empty(4, 2, dtype=x.dtype, device=x.device).normal_())
    return x + made.flatten(1)


def top(model, x):
    values, indices = x.topk(3, 1)
    values = values / values.sum(1, keepdim=True)
    return torch.zeros_like(x).scatter(1, indices, values) + x


def only_values(model, x):
    return x + x.topk(2, 1)[0].sum(1, keepdim=True) + x.max(1, keepdim=True).values


def only_indices(model, x):
    return x * x.argmax(1, keepdim=True) + x.sort(1)[1]


def ordered(model, x):
    values, indices = x.sort(1, descending=True)
    least, place = x.view(-1, 2, 4).min(2)
    middle, at = x.median(1)
    return values * indices + (least * place).sum(1, keepdim=True) + (middle * at)[:, None]


def over_the_batch(model, x):
    values, indices = x.topk(2, 0)
    return x + values.sum() + (x.max(0).values - x.min(0).values) / (1 + indices.sum())


def moments(model, x):
    variance, mean = torch.var_mean(x, 1, keepdim=True)
    deviation, centre = torch.std_mean(x, 0)
    return (x - mean) / (variance + 1).sqrt() + (x - centre) * deviation


def native_norm(model, x):
    out, mean, scale = torch.native_layer_norm(x, (WIDTH,), model.weight, None, 1e-5)
    return out + mean * scale


def router(model, x):
    weights = torch.softmax(model.gate(x), -1, dtype=x.dtype)
    chosen, experts = torch.topk(weights, 2, dim=-1)
    chosen /= chosen.sum(-1, keepdim=True)
    mask = functional.one_hot(experts, 4).to(x.dtype)
    out = torch.zeros_like(x)
    for expert in range(4):
        share = (mask[..., expert] * chosen).sum(-1, keepdim=True)
        out = out + share * torch.tanh(x @ model.experts[expert])
    return out


def dispatched(model, x):
    scores = torch.softmax(model.gate(x), -1)
    slots = torch.softmax(model.gate(x), 0)
    taken = torch.einsum("td,te->ed", x, slots)
    made = torch.einsum("ed,edf->ef", taken, model.experts)
    return torch.einsum("te,ef->tf", scores, made)


def conv1d_of_gpt2(model, x):
    y = x.view(-1, 2, 4)
    flat = torch.addmm(model.bias, y.reshape(-1, 4), model.inward)
    return flat.view(*y.shape[:2], 4).flatten(1)


def scaled_addmm(model, x):
    return (
        torch.addmm(x, x, model.square, beta=0.5, alpha=2.0)
        + torch.baddbmm(x[:, None], x[:, None], model.square.expand(len(x), -1, -1))[:, 0]
    )


def transposed_weights(model, x):
    y = functional.linear(x, model.square.t(), model.weight * 2)
    return functional.linear(y, torch.cat([model.square[:4], model.other[4:]]))


def contractions(model, x):
    y = x.view(-1, 2, 4)
    scores = torch.einsum("bid,bjd->bij", y, y)
    spread = torch.einsum("...ij,...jd->...id", scores, y)
    turned = torch.einsum("b i d, d e -> b e i", spread, model.inward)
    return turned.flatten(1) + torch.einsum("bi,bi->b", x, x)[:, None]


def implied_result(model, x):
    return torch.einsum("ij,jk", x, model.square) + torch.einsum(
        "bii->bi", (x[:, :, None] * x[:, None, :])
    )


def moved(model, x):
    y = x.view(-1, 2, 4)
    y = functional.pad(y, (1, 1, 0, 1))[:, :2, 1:5] + torch.roll(y, (1, -1), (1, 2))
    return y.flip(1).flatten(1) + torch.roll(x, 1, 0) + functional.pad(x, (2, -2))


def reflected(model, x):
    return functional.pad(x.view(-1, 1, WIDTH), (2, 2), mode="reflect")[:, 0, 1:9] + x


def gathered(model, x):
    indices = (x.abs() * 10).long() % WIDTH
    y = x.gather(1, indices) + torch.take_along_dim(x, indices[:, :1], 1)
    return (
        y
        + x.index_select(1, indices[0])
        + x[torch.arange(len(x), device=x.device), indices[:, 0], None]
    )


def scattered(model, x):
    indices = (x.abs() * 10).long() % WIDTH
    y = torch.zeros_like(x).scatter_add(1, indices, x)
    nodes = torch.zeros(len(x), WIDTH, dtype=x.dtype, device=x.device)
    edges = (indices[:, 0] + 1) % len(x)
    return y + nodes.index_add(0, edges, torch.tanh(x)) + x.index_add(1, indices[0], x)


def class_query(model, x):
    """As of class attention: what a layer gives is taken apart in two steps."""
    query = model.inner(x).unsqueeze(1).reshape(len(x), 1, 2, -1).permute(0, 2, 1, 3)
    return (query * x.view(len(x), 2, 1, -1)).flatten(1)


def windows(model, x):
    """As of shifted windows: a mask that is made by writing into parts of it."""
    regions = x.new_zeros(x.shape[1])
    for number, place in enumerate((slice(0, 2), slice(2, -1), slice(-1, None))):
        regions[place] = number
    y = x + regions
    regions.mul_(2.0)
    return y * (regions + 1.0)


def class_token(model, x):
    y = x.view(-1, 2, 4)
    y = torch.cat([model.token.expand(len(x), -1, -1), y], 1)
    y = torch.stack([model.token.expand(len(x), 3, -1), y], 1).sum(1)
    y = torch.tanh(y @ model.inward)
    return torch.cat([y[:, 0], y[:, 1] + y[:, 2]], 1)


def zeros_first(model, x):
    y = torch.cat([torch.zeros(len(x), 1, 4, dtype=x.dtype, device=x.device), x.view(-1, 2, 4)], 1)
    return (torch.tanh(y) @ model.inward)[:, :2].flatten(1)


def both_views(model, x):
    """Samples beside samples, as in contrastive learning."""
    y = functional.normalize(model.inner(torch.cat([x, -2 * x])), dim=1)
    first, second = y.chunk(2)
    return first @ second.t() @ x


def grouped_queries(model, x):
    y = x.view(-1, 4, 2, 1)
    mask = torch.ones(2, 2, dtype=torch.bool, device=x.device).tril()
    out = functional.scaled_dot_product_attention(
        y, y[:, :2], y[:, ::2], attn_mask=mask, enable_gqa=True
    )
    return out.flatten(1)


def masked_attention(model, x):
    y = x.view(-1, 2, 2, 2)
    mask = (x.view(-1, 1, 4, 2)[:, :, 2:] > 0.5).masked_fill(
        torch.eye(2, dtype=torch.bool, device=x.device), True
    )
    return functional.scaled_dot_product_attention(y, y, y, mask, dropout_p=0.2).flatten(1)


def by_frequency(model, x):
    return model.scaled((x.abs() * 10).long() % 5).mean(1) + x


def batch_statistics(model, x):
    return (
        torch.linalg.inv(x.t() @ x + 5 * torch.eye(WIDTH, dtype=x.dtype, device=x.device))[: len(x)]
        + torch.cdist(x, x) @ x
    )


def rows_inverted(model, x):
    return torch.linalg.solve(
        torch.diag_embed(x.abs() + 1) + model.square.square(), x[..., None]
    ).squeeze(-1)


def pooled(model, x):
    y, indices = functional.max_pool1d(x.view(-1, 1, WIDTH), 2, return_indices=True)
    return functional.max_unpool1d(y, indices, 2)[:, 0] + x


def repeated(model, x):
    y = x.view(-1, 2, 4).repeat(1, 2, 1)[:, 1:3] + x.view(-1, 2, 4).repeat_interleave(2, 1)[:, :2]
    return y.flatten(1) + x.unfold(1, 2, 1).sum(-1).sum(-1, keepdim=True)


def _weights(*names):
    sizes = {
        "square": (WIDTH, WIDTH),
        "other": (WIDTH, WIDTH),
        "inward": (4, 4),
        "experts": (4, WIDTH, WIDTH),
        "token": (1, 1, 4),
        "read": (6, 2),
        "positions": (5, 2),
        "weight": (WIDTH,),
        "bias": (4,),
    }
    return {n: lambda n=n: nn.Parameter(torch.randn(sizes[n]) * 0.5) for n in names}


def _linear(name, width=WIDTH):
    return {name: lambda: nn.Linear(WIDTH, width)}


MIDDLES = {
    "lstm_outputs": recurrent(nn.LSTM, (0, 1, 2)),
    "lstm_dropout": recurrent(nn.LSTM, (0, 1), num_layers=2, dropout=0.5),
    "lstm_states": recurrent(nn.LSTM, (1, 2), num_layers=2, bidirectional=True),
    "gru_dropout": recurrent(nn.GRU, (0, 1), num_layers=3, dropout=0.3, bidirectional=True),
    "gru_one_output": recurrent(nn.GRU, (0,), num_layers=2, dropout=0.3),
    "rnn_relu": recurrent(nn.RNN, (0, 1), num_layers=2, dropout=0.2, nonlinearity="relu"),
    "time_first": (time_first, {"cell": lambda: nn.LSTM(2, 2, 2, dropout=0.5)}),
    "with_state": (with_state, {"cell": lambda: nn.GRU(2, 2, 2, batch_first=True)}),
    "cells": (cells, {"cell": lambda: nn.LSTMCell(2, 4)}),
    "gru_cells": (gru_cells, {"cell": lambda: nn.GRUCell(WIDTH, WIDTH)}),
    "plain_cells": (
        plain_cells,
        {
            "cell": lambda: nn.RNNCell(2, 4),
            "other_cell": lambda: nn.RNNCell(2, 4, bias=False, nonlinearity="relu"),
        },
    ),
    "last_hidden": (last_hidden, {"cell": lambda: nn.LSTMCell(WIDTH, WIDTH, bias=False)}),
    "decoder": (
        decoder,
        {**_linear("inner"), **_weights("read"), "cell": lambda: nn.LSTMCell(2, 6)},
    ),
    "gated_graph": (gated_graph, {**_linear("inner"), "cell": lambda: nn.GRUCell(WIDTH, WIDTH)}),
    "penalised_cell": (penalised_cell, {"cell": lambda: nn.GRUCell(WIDTH, WIDTH)}),
    "normalised_cell": (
        normalised_cell,
        {
            "cell": lambda: nn.utils.parametrizations.weight_norm(
                nn.RNNCell(WIDTH, WIDTH), "weight_hh"
            )
        },
    ),
    "quantised": (quantised, {"codes": lambda: nn.Embedding(5, 4)}),
    "shifted_scores": (shifted_scores, _weights("positions")),
    "made_weights": (made_weights, _linear("wide", WIDTH * WIDTH)),
    "coupled": (coupled, _linear("inner")),
    "best_paths": (best_paths, _weights("inward")),
    "routed_capsules": (routed_capsules, _weights("experts")),
    "excited": (excited, {"squeeze": lambda: nn.Conv2d(2, 2, 1)}),
    "triples": (triples, _linear("inner")),
    "drop_path": (drop_path, _linear("inner")),
    "channels_dropped": (channels_dropped, {}),
    "gumbel": (gumbel, {}),
    "gumbel_hard": (gumbel_hard, {}),
    "sampled_code": (sampled_code, _linear("inner")),
    "noisy": (noisy, {"table": lambda: nn.Embedding(5, WIDTH)}),
    "random_permuted": (random_permuted, {}),
    "chances": (chances, {}),
    "unused_draws": (unused_draws, {}),
    "drawn_in_place": (drawn_in_place, {}),
    "top": (top, {}),
    "only_values": (only_values, {}),
    "only_indices": (only_indices, {}),
    "ordered": (ordered, {}),
    "over_the_batch": (over_the_batch, {}),
    "moments": (moments, {}),
    "native_norm": (native_norm, _weights("weight")),
    "router": (router, {**_linear("gate", 4), **_weights("experts")}),
    "dispatched": (dispatched, {**_linear("gate", 4), **_weights("experts")}),
    "conv1d_of_gpt2": (conv1d_of_gpt2, _weights("bias", "inward")),
    "scaled_addmm": (scaled_addmm, _weights("square")),
    "transposed_weights": (transposed_weights, _weights("square", "other", "weight")),
    "contractions": (contractions, _weights("inward")),
    "implied_result": (implied_result, _weights("square")),
    "moved": (moved, {}),
    "reflected": (reflected, {}),
    "gathered": (gathered, {}),
    "scattered": (scattered, {}),
    "class_token": (class_token, _weights("token", "inward")),
    "zeros_first": (zeros_first, _weights("inward")),
    "both_views": (both_views, _linear("inner")),
    "grouped_queries": (grouped_queries, {}),
    "masked_attention": (masked_attention, {}),
    "by_frequency": (
        by_frequency,
        {"scaled": lambda: nn.Embedding(5, WIDTH, scale_grad_by_freq=True)},
    ),
    "batch_statistics": (batch_statistics, {}),
    "rows_inverted": (rows_inverted, _weights("square")),
    "pooled": (pooled, {}),
    "repeated": (repeated, {}),
    "class_query": (class_query, _linear("inner")),
    "windows": (windows, {}),
}
"""By name what is computed between the layers, and the modules and parameters that it needs."""
