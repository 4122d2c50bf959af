"""Layers of a transformer decoder: attention, feed-forward network, MLP.

Letters: B images, N queries, S tokens, C channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Scaled dot-product attention with several heads, residual, and normalization after it.

    Args:
        channels: channels of queries and tokens.
        heads: number of heads that the channels are split into.
        dropout: probability, in training, that an attention weight or an element of the output is set to zero.
    """

    def __init__(self, channels: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.in_weight = nn.Parameter(torch.empty(3 * channels, channels))  # for queries, keys and values
        self.in_bias = nn.Parameter(torch.zeros(3 * channels))
        self.output = nn.Linear(channels, channels)
        self.norm = nn.LayerNorm(channels)
        nn.init.xavier_uniform_(self.in_weight)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, C) queries, updated by what they attend to.

        Args:
            queries: (B, N, C).
            positions: added to the queries where attention weights are computed.
            keys: (B, S, C).
            values: (B, S, C).
            mask: (B, N, S) bool, true where a query may attend; at least one token for each query.
        """
        weights, biases = self.in_weight.chunk(3), self.in_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((queries + positions, keys, values), weights, biases, strict=True)
        )  # (B, heads, N or S, C / heads)
        per_head = None if mask is None else mask[:, None]
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=per_head, dropout_p=dropout)
        return cast(Tensor, self.norm(queries + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))))


class FeedForward(nn.Module):
    """Two linear layers with ReLU between them, residual, and normalization after it: (..., C) to (..., C).

    Args:
        channels: channels in and out.
        hidden: channels between the two layers.
        dropout: probability, in training, that an element after each layer is set to zero.
    """

    def __init__(self, channels: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear1 = nn.Linear(channels, hidden)
        self.linear2 = nn.Linear(hidden, channels)
        self.norm = nn.LayerNorm(channels)
        for layer in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        hidden = self.dropout(F.relu_(self.linear1(x)))
        return cast(Tensor, self.norm(x + self.dropout(self.linear2(hidden))))


class MLP(nn.Sequential):
    """Linear layers with ReLU between them.

    Args:
        channels: channels in.
        layers: number of layers.
        hidden: channels between layers; by default as many as in.
        outputs: channels out; by default as many as in.
    """

    def __init__(self, channels: int, layers: int, hidden: int | None = None, outputs: int | None = None) -> None:
        widths = [channels, *[hidden or channels] * (layers - 1), outputs or channels]
        super().__init__(*(nn.Linear(width, following) for width, following in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) to (..., outputs)."""
        for i, layer in enumerate(self):
            x = layer(x if i == 0 else F.relu_(x))
        return x
