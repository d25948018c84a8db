"""The plain decoder of kvjax in torch, and its training step, for scripts/bench/training.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Block(nn.Module):
    """A layer of attention with rotary positions and a gated MLP, from a layer's weights [1, in, out]."""

    def __init__(self, config: Any, weights: dict[str, Any]):
        super().__init__()
        self.config = config
        for name, w in weights.items():
            x = torch.tensor(np.asarray(w[0]))
            setattr(self, name, nn.Parameter(x if x.ndim == 1 else x.T.contiguous()))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, y = self.config, normed(x, self.attn_norm, self.config.norm_eps)

        def heads(w: torch.Tensor, count: int) -> torch.Tensor:
            return F.linear(y, w).unflatten(-1, (count, c.head_dim)).transpose(1, 2)

        q, k, v = heads(self.q, c.heads), heads(self.k, c.kv_heads), heads(self.v, c.kv_heads)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.heads != c.kv_heads)
        x = x + F.linear(out.transpose(1, 2).flatten(2), self.o)
        y = normed(x, self.mlp_norm, c.norm_eps)
        return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Theirs:
    """Training steps of AdamW after clipping, by the `optimiser` settings, on the same rows each time."""

    def __init__(self, config: Any, params: Any, tokens: np.ndarray, optimiser: Any, threads: int):
        torch.set_num_threads(threads)
        self.config, self.clip = config, optimiser.clip
        self.embed = nn.Parameter(torch.tensor(np.asarray(params["embed"])))
        self.norm = nn.Parameter(torch.tensor(np.asarray(params["norm"])))
        self.unembed = nn.Parameter(torch.tensor(np.asarray(params["unembed"])).T.contiguous())
        self.blocks = nn.ModuleList(Block(config, p) for p in params["layers"])
        self.tokens = torch.tensor(tokens.astype(np.int64))
        place = torch.arange(tokens.shape[1] - 1)[:, None]
        rates = config.rope.theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.cos, self.sin = torch.cos(place * rates), torch.sin(place * rates)
        self.all = [self.embed, self.norm, self.unembed, *self.blocks.parameters()]
        groups = [
            {"params": [p for p in self.all if p.ndim > 1], "weight_decay": optimiser.weight_decay},
            {"params": [p for p in self.all if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.rule = torch.optim.AdamW(
            groups, optimiser.peak, (optimiser.b1, optimiser.b2), optimiser.eps, fused=True
        )

    def step(self) -> float:
        """One training step; returns its loss in nats per token."""
        x = F.embedding(self.tokens[:, :-1], self.embed)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(normed(x, self.norm, self.config.norm_eps), self.unembed)
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.rule.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.all, self.clip)
        self.rule.step()
        return float(loss.detach())
