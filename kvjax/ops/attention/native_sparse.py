"""Native sparse attention: compressed blocks, the blocks that they point to, and a window, under gates."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.attention.token_cache import (
    QUERIES,
    Places,
    TokenCache,
    attend,
    mix,
    over_queries,
    products,
    seen,
    stored,
)
from kvjax.ops.base.softmax import softmax


class BlockSizes(NamedTuple):
    """Tokens of a compressed block and of the stride between two, and of a selected block; what is read.

    top: blocks that a query reads, among them the `initial` first and the `local` newest ones. window: the
    newest tokens that it reads beside these.
    """

    compress: int
    stride: int
    block: int
    top: int
    initial: int
    local: int
    window: int

    def compressed(self, slots: int) -> int:
        """How many compressed blocks so many slots have."""
        return max((slots - self.compress) // self.stride + 1, 0)

    def overlap(self, slots: int) -> Float[np.ndarray, "M J"]:
        """How many strides of compressed block m lie in block j (eq. 9)."""
        m, j = np.arange(self.compressed(slots))[:, None], np.arange(-(-slots // self.block))
        first, each = m * self.stride, self.compress
        inside = np.minimum(first + each, (j + 1) * self.block) - np.maximum(first, j * self.block)
        return np.maximum(inside, 0).astype(np.float32) / self.stride


def blocks_of(x: Float[Array, "B S H K"], sizes: BlockSizes) -> Float[Array, "B M L H K"]:
    """Gather the tokens of every compressed block."""
    at = np.arange(sizes.compressed(x.shape[1]))[:, None] * sizes.stride + np.arange(sizes.compress)
    return x[:, at]


def native_sparse_attention(
    q: Float[Array, "B T N K"],
    gates: Float[Array, "B T N 3"],
    slots: TokenCache,
    at: Places,
    compressed: tuple[Float[Array, "B M H K"], Float[Array, "B M H V"]],
    sizes: BlockSizes,
) -> Float[Array, "B T N V"]:
    """Native Sparse Attention (NSA; Yuan et al., 2025, arXiv:2502.11089, eq. 5-12) of tokens in a cache.

        o = g_1 Attn(q, compressed) + g_2 Attn(q, selected blocks) + g_3 Attn(q, window)

    compressed: a key and a value of every compressed block, which is visible once all its tokens are. The
    importance of a block is the attention to compressed blocks in it, summed over the query heads of a KV
    head; it has no gradient. gates: g. A query before the first compressed block gets zeros of it.
    """
    keys = stored(slots)
    body = partial(_some, slots=slots, keys=keys, compressed=compressed, sizes=sizes)
    return over_queries(body, (q, gates), at, QUERIES)


def _some(
    queries: tuple[Float[Array, "B T N K"], Float[Array, "B T N 3"]], at: Places, *, slots: TokenCache,
    keys: Int[Array, "B S"], compressed: tuple[Array, Array], sizes: BlockSizes,
) -> Float[Array, "B T N V"]:  # fmt: skip
    q, gates = queries
    k, v, scale = slots.kept["k"], slots.kept["v"], q.shape[-1] ** -0.5
    coarse, p = coarse_attention(q, at, compressed, scale, sizes)
    importance = p @ jnp.asarray(sizes.overlap(k.shape[1]), p.dtype)
    hit = chosen(importance, at.slot, sizes)
    fine = jnp.repeat(hit, sizes.block, -1)[..., : k.shape[1]] & seen(at, keys)
    fine = jnp.repeat(fine, q.shape[2] // k.shape[2], 1)
    selected, _ = attend(q, k, v, fine, scale=scale)
    near, _ = attend(q, k, v, seen(at, keys, sizes.window), scale=scale)
    g = gates.astype(coarse.dtype)
    return g[..., :1] * coarse + g[..., 1:2] * selected + g[..., 2:] * near


def coarse_attention(
    q: Float[Array, "B T N K"], at: Places, compressed: tuple[Array, Array], scale: float, sizes: BlockSizes
) -> tuple[Float[Array, "B T N V"], Float[Array, "B H T M"]]:
    """Attention to compressed blocks, and its weights summed over the query heads of a KV head."""
    k, v = compressed
    if not k.shape[1]:
        b, t, n, _ = q.shape
        return jnp.zeros((b, t, n, v.shape[-1]), q.dtype), jnp.zeros((b, k.shape[2], t, 0), q.dtype)
    ends = np.arange(k.shape[1]) * sizes.stride + sizes.compress - 1
    visible = (at.slot[..., None] >= jnp.asarray(ends, jnp.int32)[None, None])[:, None]
    p, _ = softmax(products(q, k) * scale, visible)
    return mix(p, v), p.reshape(p.shape[0], k.shape[2], -1, *p.shape[2:]).sum(2)


def chosen(
    importance: Float[Array, "B H T J"], slot: Int[Array, "B T"], sizes: BlockSizes
) -> Bool[Array, "B H T J"]:
    """Which blocks a query reads: the first, the newest, and the most important; of equal ones the first."""
    block = jnp.arange(importance.shape[-1], dtype=jnp.int32)[None, None]
    own = slot[..., None] // sizes.block
    fixed = ((block < sizes.initial) | (block > own - sizes.local))[:, None]
    score = jnp.where(fixed, jnp.inf, jax.lax.stop_gradient(importance))
    score = jnp.where((block <= own)[:, None], score, -jnp.inf)
    best, at = jax.lax.top_k(score, min(sizes.top, score.shape[-1]))
    return jnp.put_along_axis(jnp.zeros(score.shape, bool), at, best > -jnp.inf, -1, inplace=False)
