"""The parts of the rows of architectures.py: the sizes of Llama-2-7B, and formulas in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import KimiDelta

LAYERS = 32
# Llama-2-7B's sizes: 32 layers of width 4096 with 32 heads of 128 channels.
BASE = Config(vocab=1024, d_model=4096, layers=LAYERS, heads=32, kv_heads=8, head_dim=128, d_ff=11008)
MLA = Latent(rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536)
KDA = KimiDelta(heads=32, key_dim=128, value_dim=128)
MAMBA = Mamba2(heads=128, key_dim=128, value_dim=64, groups=1)
XC = CrossAttention(width=4096, kv_heads=32, turns=True)
CEPE = CrossAttention(width=1024, kv_heads=32)
STATE = 32 * 128 * 128 * 4
TAIL = 4 * 3 * 4096 * 2
# Bytes of keys and values of one token in one layer of BASE, and in all of its layers.
KV = 2 * 8 * 128 * 2
ATTENTION = "2 L K H"


class Row(NamedTuple):
    """name; paper; how to select it; the formula in words and in bytes: (per token, constant), bfloat16."""

    name: str
    paper: str
    select: str
    config: Config | BlockConfig
    words: str
    token: int
    constant: int = 0


def of(pattern: list, **options) -> Config:
    """Return BASE with mixers that repeat a pattern over the layers."""
    mixers = tuple(pattern[i % len(pattern)] for i in range(LAYERS))
    return dataclasses.replace(BASE, mixers=mixers, **options)


def maps(sources: Iterable[int | None], **options) -> Config:
    return dataclasses.replace(BASE, mixers=tuple(Attention(source=s) for s in sources), **options)
