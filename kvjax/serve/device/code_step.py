"""A decode step over pages of codes: appends a token to every row, attends, and encodes what is due."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.union import Keys, attend
from kvjax.serve.device.code_pages import PageLayout, encoded, listed, put
from kvjax.serve.holding import Holding


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["coded", "plain", "holding"])
@dataclasses.dataclass(frozen=True)
class CodePool:
    """Pages of codes in words [Lg, P, R, W].

    plain: the layout of the pages with the newest tokens, uncoded, which come first in a list's table; None
    if all tokens are coded at once. Then positions are stored with them; otherwise a list holds every token,
    and its order is the order of positions.
    """

    words: Int[Array, "L P R W"]
    coded: PageLayout
    plain: PageLayout | None
    holding: Holding

    def coded_tokens(self, stored: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many tokens of lists of `stored` tokens are coded."""
        holding = self.holding
        return jnp.maximum(stored - holding.residual, 0) // holding.granule * holding.granule


def append_and_attend(
    pool: CodePool, table: Int[Array, "R K M"], stored: Int[Array, "R K"], counts: Int[Array, "R"],
    q: Float[Array, "R N T H"], new: tuple[Array, Array], pos: Int[Array, "R T"], layer: int | Array,
    **options: Any,
) -> tuple[Float[Array, "R N T H"], CodePool]:  # fmt: skip
    """Attention of the first `counts` of T tokens over their row's lists and each other, and the new pool.

    new: their keys and values [R, K, T, H], rotated; pos: -1 for tokens beyond. A pool with uncoded tokens
    takes T = 1. options: as of `attend`.
    """
    count = stored + counts[:, None]
    if pool.plain is not None:
        writes = _writes(stored, counts, pos)
        return _with_residual(pool, table, stored, count, writes, q, new, pos, layer, options)
    pool = append_codes(pool, table, stored, counts, new, pos, layer)
    return attend_codes(pool, table, count, q, pos, layer, **options)[0], pool


def append_codes(
    pool: CodePool, table: Int[Array, "R K M"], stored: Int[Array, "R K"], counts: Int[Array, "R"],
    new: tuple[Array, Array], pos: Int[Array, "R T"], layer: int | Array,
) -> CodePool:  # fmt: skip
    """Append the first `counts` of T tokens to their row's lists, in a pool without uncoded tokens."""
    writes = _writes(stored, counts, pos)
    words = encoded(pool.coded, *new, jnp.broadcast_to(pos[:, None], writes.shape))
    at = stored[..., None] + _places(pos.shape[1])
    held = put(pool.words, pool.coded, table, at, words, writes, layer)
    return dataclasses.replace(pool, words=held)


def attend_codes(
    pool: CodePool, table: Int[Array, "B K M"], count: Int[Array, "B K"], q: Float[Array, "B N T H"],
    pos: Int[Array, "B T"], layer: int | Array, **options: Any,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:  # fmt: skip
    """Attention over the first `count` tokens of every list: (out, lse)."""
    k, v, at = listed(pool.words, pool.coded, table, layer)
    assert at is not None
    live = _places(at.shape[2]) < count[..., None]
    return attend(q, keys_of(k, v, jnp.where(live, at, -1)), pos, **options)[:2]


def _writes(stored: Array, counts: Array, pos: Array) -> Array:
    """Which of T tokens [R, K, T] are stored."""
    count = pos.shape[1]
    return jnp.broadcast_to(_places(count) < counts[:, None, None], (*stored.shape, count))


def _with_residual(
    pool: CodePool, table: Array, stored: Array, count: Array, writes: Array, q: Array,
    new: tuple[Array, Array], pos: Array, layer: int | Array, options: dict[str, Any],
) -> tuple[Array, CodePool]:  # fmt: skip
    """Append to the ring of uncoded tokens; then, where it is full, encode its oldest granule."""
    holding, plain, coded = pool.holding, pool.plain, pool.coded
    assert plain is not None
    ring, first, granule = holding.ring, holding.first, holding.granule
    at = (stored % ring)[..., None]
    words = encoded(plain, *new, jnp.zeros((*stored.shape, 1), jnp.int32))
    held = put(pool.words, plain, table[..., :first], at, words, writes, layer)
    begins = pool.coded_tokens(stored)[..., None]
    k, v = (x[:, :, :ring] for x in listed(held, plain, table[..., :first], layer)[:2])
    token = begins + (_places(ring) - begins) % ring
    tail = keys_of(k, v, jnp.where(token < count[..., None], token, -1))
    rest = table[..., first:]
    k_old, v_old, _ = listed(held, coded, rest, layer)
    token = jnp.broadcast_to(_places(k_old.shape[2]), k_old.shape[:3])
    body = keys_of(k_old, v_old, jnp.where(token < begins, token, -1))
    out, _, _ = attend(q, [body, tail], pos, **options)
    oldest = ((begins + _places(granule)) % ring)[..., None]
    k, v = (jnp.take_along_axis(x, oldest, 2) for x in (k, v))
    due = pool.coded_tokens(count)[..., None] > begins
    words = encoded(coded, k, v, jnp.zeros(k.shape[:3], jnp.int32))
    held = put(held, coded, rest, begins // granule, words, due, layer)
    return out, dataclasses.replace(pool, words=held)


def _places(count: int) -> Int[Array, "1 1 S"]:
    return jnp.arange(count, dtype=jnp.int32)[None, None]


def keys_of(k: Array, v: Array, pos: Array) -> Keys:
    """Keys whose empty slots have values of 0: what no token has written may be anything, NaN included.

    Logits of empty slots are replaced, whatever they are.
    """
    return Keys(k, jnp.where((pos >= 0)[..., None], v, 0), pos)


@partial(jax.jit, donate_argnames=("pools",))
def adopt_codes(
    pools: tuple[CodePool, ...], table: Int[Array, "K M"], new: tuple[tuple[Array, ...], ...],
    counts: tuple[Int[Array, "Lg K"], ...], stored: tuple[Int[Array, "Lg K"], ...],
    tails: tuple[tuple[Array, ...], ...],
) -> tuple[CodePool, ...]:  # fmt: skip
    """Write the first `counts` granules of words [Lg, K, G, n] of every KV head to its pages.

    stored: tokens of each list, those that are not coded included. tails: the ring of these as words; empty
    without one.
    """
    done = []
    for i, (pool, words, count) in enumerate(zip(pools, new, counts, strict=True)):
        first = pool.holding.first
        held = _adopted(pool.words, pool.coded, table[:, first:], words, count)
        if pool.plain is not None:
            # A list shorter than the ring has no pages for the rest of it.
            ring = jnp.minimum(stored[i], pool.holding.ring)
            held = _adopted(held, pool.plain, table[:, :first], tails[i], ring)
        done.append(dataclasses.replace(pool, words=held))
    return tuple(done)


def _adopted(words: Array, layout: PageLayout, table: Array, new: tuple[Array, ...], count: Array) -> Array:
    layers, heads, granules, _ = new[0].shape
    at = jnp.broadcast_to(jnp.arange(granules), (layers, heads, granules))
    lists = jnp.broadcast_to(table, (layers, *table.shape))
    layer = jnp.arange(layers)[:, None, None]
    return put(words, layout, lists, at, new, at < count[..., None], layer)
