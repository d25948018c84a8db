"""What reads in prompts share: representatives of blocks, what is visible to whom, and covering shares."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.grammar.prompt_reads import PromptQueries
from kvjax.ops.attention.union import NEG_INF
from kvjax.ops.base.dtypes import wide


def lengthened(x: Array, multiple: int, axis: int, value: int = 0) -> Array:
    """Pad an axis at its end to a multiple."""
    pads = [(0, -x.shape[i] % multiple if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value)


def in_blocks(x: Shaped[Array, "B N T *_"], size: int) -> Shaped[Array, "B N P S *_"]:
    """Tokens in blocks of `size`."""
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def mean_of(x: Float[Array, "B N T H"], pos: Int[Array, "B T"], size: int) -> Float[Array, "B N P H"]:
    """Compute the mean of the tokens of every block; 0 where there is none."""
    live = in_blocks((pos >= 0)[:, None, :, None], size)
    total = jnp.where(live, in_blocks(x.astype(wide(x)), size), 0.0).sum(3)
    return total / jnp.maximum(live.sum(3), 1).astype(total.dtype)


def visible_blocks(pos: Int[Array, "B T"], segment: int, block: int) -> Bool[Array, "B 1 I J"]:
    """Which blocks have a token that some query of a segment sees."""
    at = np.arange(pos.shape[1])
    queries, keys = (pos.reshape(pos.shape[0], -1, n) >= 0 for n in (segment, block))
    before = at[::block][None, :] <= at[segment - 1 :: segment][:, None]
    return (queries.any(-1)[:, :, None] & keys.any(-1)[:, None] & before[None])[:, None]


def own_blocks(tokens: int, segment: int, block: int) -> Bool[np.ndarray, "1 1 I J"]:
    """Which blocks have tokens of a segment."""
    starts, ends = np.arange(0, tokens, segment)[:, None], np.arange(0, tokens, block)[None]
    return ((ends < starts + segment) & (ends + block > starts))[None, None]


def softmax_over(scores: Float[Array, "*b J"], seen: Bool[Array, "*#b J"]) -> Float[Array, "*b J"]:
    """Compute the softmax over what is seen; 0 elsewhere, and everywhere if nothing is."""
    hidden = jnp.where(seen, scores, NEG_INF)
    top = hidden.max(-1, keepdims=True)
    weights = jnp.exp(hidden - jnp.where(top == NEG_INF, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def ranks(x: Float[Array, "*b J"]) -> Int[Array, "*b J"]:
    """How many entries come before each in descending order; of equal ones the first."""
    order = jnp.argsort(-x, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def covering(p: Float[Array, "*b J"], most: Float[Array, "*#b 1"]) -> Bool[Array, "*b J"]:
    """Mark the fewest of the largest entries whose sum is at least `most`, of numbers not negative."""
    order = jnp.argsort(-p, axis=-1, stable=True)
    ordered = jnp.take_along_axis(p, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    taken = (before < most) & (ordered > 0)
    return jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1)


def newest_attention(
    prompt: PromptQueries, count: int
) -> tuple[Float[Array, "B N W T"], Int[Array, "B W"], Float[Array, "B N W H"]]:
    """Compute the attention of every row's newest `count` queries to its keys, their indices, and queries.

    Indices are -1, and the attention is 0, where a row is shorter.
    """
    index = prompt.length[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    at = jnp.maximum(index, 0)
    q = jnp.take_along_axis(prompt.q, at[:, None, :, None], axis=2)
    b, n, _, h = q.shape
    heads = prompt.k.shape[1]
    rows = q.reshape(b, heads, -1, h)
    s = jnp.einsum("bkrh,bkth->bkrt", rows, prompt.k, preferred_element_type=wide(q)) * prompt.scale
    seen = (jnp.arange(prompt.k.shape[2])[None, None] <= index[:, :, None]) & (prompt.pos >= 0)[:, None]
    p = softmax_over(s.reshape(b, n, count, -1), seen[:, None])
    return p, jnp.where(index >= 0, index, -1), jnp.where((index >= 0)[:, None, :, None], q, 0)


def by_distance(p: Float[Array, "B N W T"], index: Int[Array, "B W"]) -> Float[Array, "B N T"]:
    """Sum along diagonals: of the attention to keys `d` tokens before the query, for every d."""
    key = index[:, :, None] - jnp.arange(p.shape[-1])[None, None]
    found = jnp.take_along_axis(p, jnp.maximum(key, 0)[:, None], axis=3)
    return jnp.where((key >= 0)[:, None], found, 0.0).sum(2)


def blocks_at_distances(picked: Bool[Array, "B N T"], segment: int, block: int) -> Bool[Array, "B N I J"]:
    """Find the blocks that have a key at one of these distances before some query of a segment."""
    tokens = picked.shape[-1]
    starts, blocks = np.arange(0, tokens, segment)[:, None], np.arange(0, tokens, block)[None]
    least, most = starts - blocks - block + 1, starts + segment - 1 - blocks
    so_far = jnp.pad(jnp.cumsum(picked, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    low, high = np.clip(least, 0, tokens), np.clip(most + 1, 0, tokens)
    return (so_far[..., high] > so_far[..., low]) & (high > low)[None, None]
