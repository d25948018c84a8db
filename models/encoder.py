"""Encoders: from the tokens of a context to the hidden states for a decoder's cross-attention."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.models.config import Config
from kvjax.models.layers import Params, stream_norm
from kvjax.models.transformer import hidden
from kvjax.ops.attention.union import Keys


def encode(
    params: Params,
    tokens: Int[Array, "B S"],
    config: Config,
    lengths: Int[Array, "B"] | None = None,
    chunk: int | None = None,
) -> Keys:
    """Hidden states of a context after the encoder's last norm, [B, 1, S, D], with their positions.

    tokens are right-padded, `lengths` of them real; a row may be empty. The encoder is any model: a causal
    decoder (XC-Cache, arXiv:2404.15420) or one of `Bidirectional` layers (CEPE, arXiv:2402.16617). chunk:
    every `chunk` tokens are encoded separately, in parallel, with positions from 0 in each (CEPE's passages);
    positions in the context continue across chunks.
    """
    b, s = tokens.shape
    lengths = jnp.full((b,), s, jnp.int32) if lengths is None else lengths
    size = min(chunk or s, s)
    count = -(-s // size)
    cut = jnp.pad(tokens, ((0, 0), (0, count * size - s))).reshape(b * count, size)
    start = jnp.arange(count, dtype=jnp.int32)[None] * size
    own = jnp.clip(lengths[:, None] - start, 0, size).reshape(-1)
    x = stream_norm(hidden(params, cut, config, own), params, "norm", config)
    e = x.reshape(b, count * size, -1)[:, None, :s]
    at = jnp.arange(s, dtype=jnp.int32)[None]
    return Keys(e, e, jnp.where(at < lengths[:, None], at, -1)[:, None])
