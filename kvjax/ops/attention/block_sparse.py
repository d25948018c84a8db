"""Attention of a prompt's queries to blocks of keys that were picked for them, in plain jnp.

A loop takes one segment of queries after another, and a few blocks of keys at a time; it ends after the last
block that was picked for a segment. So only picked blocks cost work, however unequal segments are, and scores
of all queries and keys are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.attention.union import NEG_INF, Keys, Masses, Reduction, newer_queries
from kvjax.ops.base.dispatch import platform
from kvjax.ops.base.dtypes import wide

# How many keys are attended to at a time: enough for a product of matrices to be fast.
WIDE = 512


class Picks(NamedTuple):
    """What segments of queries attend to, of the keys that they see.

    Args:
        blocks: the blocks of keys, for each of I equal segments of the queries and J equal blocks; P is the
            number of KV heads if the query heads of a group share them, or of query heads.
        columns: further keys that all segments attend to, by their index; -1 is none. A key that lies in a
            picked block, too, counts once.

    Eight queries in two segments; the second attends to its own block of keys alone:

    >>> Picks(jnp.asarray([[[[True, False], [False, True]]]])).blocks.shape
    (1, 1, 2, 2)
    """

    blocks: Bool[Array, "B P I J"]
    columns: Int[Array, "B P C"] | None = None


def block_attention(
    q: Float[Array, "B N T H"], keys: Keys, q_pos: Int[Array, "B T"], picks: Picks, *,
    scale: float, softcap: float | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
    """(out, lse) of queries over the keys that were picked for their segments, as far as they are visible.

    T is a multiple of I, and the keys, which have positions and no biases, of J. The picks of a query that
    sees none of them give 0 and -inf. Loops end where the data says, so there is no reverse gradient.

    >>> x, pos = jnp.ones((1, 1, 4, 8)), jnp.arange(4)[None]
    >>> picks = Picks(jnp.asarray([[[[True, False], [False, True]]]]))
    >>> _, lse = block_attention(x, Keys(x, x, pos[:, None]), pos, picks, scale=0.0)
    >>> jnp.exp(lse).round().tolist()
    [[[1.0, 2.0, 1.0, 2.0]]]
    """
    return _attention(_Call(q, keys, q_pos, picks, scale, softcap))


def column_attention(
    q: Float[Array, "B N T H"], keys: Keys, q_pos: Int[Array, "B T"], picks: Picks, *,
    scale: float, softcap: float | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
    """Compute the part of `block_attention` over the columns that lie in no block picked for the segment.

    >>> x, pos = jnp.ones((1, 1, 4, 8)), jnp.arange(4)[None]
    >>> picks = Picks(jnp.asarray([[[[True, False], [False, True]]]]), jnp.asarray([[[0, 1]]]))
    >>> _, lse = column_attention(x, Keys(x, x, pos[:, None]), pos, picks, scale=0.0)
    >>> jnp.exp(lse).round().tolist()
    [[[0.0, 0.0, 2.0, 2.0]]]
    """
    assert picks.columns is not None
    return _attention(_Call(q, keys, q_pos, picks, scale, softcap, columns_alone=True))


def in_order(blocks: Bool[Array, "B P I J"]) -> tuple[Int[Array, "B P I J"], Int[Array, "B P I"]]:
    """Order the blocks of every segment, the picked ones first and ascending, and count those picked.

    >>> order, count = in_order(jnp.asarray([[[[False, True, True]]]]))
    >>> order.tolist(), count.tolist()
    ([[[[1, 2, 0]]]], [[[2]]])
    """
    order = jnp.argsort(~blocks, axis=-1, stable=True).astype(jnp.int32)
    return order, blocks.sum(-1, dtype=jnp.int32)


def _attention(call: _Call) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Return (out, lse) over all that was picked."""

    def segment(part: _Part) -> tuple[Array, Array]:
        queries = part.q.reshape(-1, part.q.shape[-1])

        def more(state: tuple[Array, Array, Array], met: _Met) -> tuple[Array, Array, Array]:
            top, total, out = state
            scores = call.scores(queries, part, met)
            new = jnp.maximum(top, scores.max(-1))
            safe = jnp.where(new == NEG_INF, 0.0, new)
            weights, fade = jnp.exp(scores - safe[:, None]), jnp.exp(top - safe)
            values = jnp.dot(weights.astype(met.v.dtype), met.v, preferred_element_type=out.dtype)
            return new, total * fade + weights.sum(-1), out * fade[:, None] + values

        kind, rows = call.wide, queries.shape[0]
        start = jnp.full(rows, NEG_INF, kind), jnp.zeros(rows, kind)
        top, total, out = call.over(part, more, (*start, jnp.zeros((rows, call.v.shape[-1]), kind)))
        safe = jnp.where(total == 0.0, 1.0, total)
        lse = jnp.where(total == 0.0, NEG_INF, top + jnp.log(safe))
        heads = part.q.shape[:2]
        return (out / safe[:, None]).reshape(*heads, -1).astype(call.q.dtype), lse.reshape(heads)

    out, lse = call.each(segment)
    return call.joined(out), call.joined(lse)


def block_received(
    q: Float[Array, "B N T H"], keys: Keys, lse: Float[Array, "B N T"], q_pos: Int[Array, "B T"],
    picks: Picks, mass: tuple[Reduction, ...], *, scale: float, softcap: float | None = None,
) -> Masses:  # fmt: skip
    """Compute the attention that every key received from queries whose attention to all has this `lse`.

    It is 0 where no segment picked a key. Options are those of `block_attention`.
    """
    call, newer = _Call(q, keys, q_pos, picks, scale, softcap), newer_queries(q_pos, mass)
    i, slots = picks.blocks.shape[2], keys.k.shape[2]
    ends = call.cut(lse)
    after = None if newer is None else newer.reshape(*newer.shape[:-1], i, -1)

    def row(r: Array) -> tuple[Array, ...]:
        def segment(found: tuple[Array, ...], at: tuple[_Part, Array, Array | None]) -> tuple[Any, None]:
            part, end, later = at
            queries, end = part.q.reshape(-1, q.shape[-1]), end.reshape(-1, 1)
            safe = jnp.where(end == NEG_INF, 0.0, end)

            def more(found: tuple[Array, ...], met: _Met) -> tuple[Array, ...]:
                p = jnp.exp(call.scores(queries, part, met) - safe)
                p = p.reshape(1, 1, *part.q.shape[:2], -1)
                seen = [one.of(p, None if later is None else later[None])[0, 0] for one in mass]
                at = jnp.where(met.live, met.index, slots)
                put = lambda one, x: x.max if one.kind == "max" else x.add  # noqa: E731
                return tuple(
                    put(one, x.at[at])(y, mode="drop") for one, x, y in zip(mass, found, seen, strict=True)
                )

            return call.over(part, more, found), None

        zero = tuple(jnp.zeros(slots, wide(q)) for _ in mass)
        strips = call.row(r), ends[r], None if after is None else after[r // call.lists]
        return jax.lax.scan(segment, zero, strips)[0]

    heads, b = keys.k.shape[1], q.shape[0]
    found = jax.lax.map(row, jnp.arange(b * call.lists, dtype=jnp.int32))
    return tuple(one.over(x.reshape(b, heads, -1, slots), 2) for one, x in zip(mass, found, strict=True))


class _Part(NamedTuple):
    """One segment of the queries of a list of picks, and what was picked for it.

    q: [G, S, H], those of the heads that share the picks. blocks: which were picked. order: the blocks, those
    that were picked first; `count` of them are attended to.
    """

    q: Array
    pos: Array
    blocks: Array
    order: Array
    count: Array
    row: Array


class _Met(NamedTuple):
    """Keys and values that a segment attends to at a time: their positions, their indices, which count."""

    k: Array
    v: Array
    pos: Array
    index: Array
    live: Array


class _Call:
    """The operands of a call, cut into lists of picks and segments."""

    def __init__(
        self, q: Array, keys: Keys, q_pos: Array, picks: Picks, scale: float, softcap: float | None,
        *, columns_alone: bool = False,
    ):  # fmt: skip
        assert keys.pos is not None and keys.bias is None and keys.until is None
        b, lists, i, j = picks.blocks.shape
        self.lists, self.segments, self.block = lists, i, keys.k.shape[2] // j
        self.heads, self.shape, self.scale, self.softcap = keys.k.shape[1], q.shape, scale, softcap
        self.k, self.v = (x.reshape(-1, *x.shape[2:]) for x in (keys.k, keys.v))
        pos = jnp.broadcast_to(keys.pos, keys.k.shape[:3])
        self.k_pos = pos.reshape(-1, pos.shape[-1])
        self.q, self.q_pos, self.wide = self.cut(q), q_pos.reshape(b, i, -1), wide(q)
        self.blocks = picks.blocks.reshape(b * lists, i, j)
        columns = picks.columns
        self.columns = None if columns is None else columns.reshape(b * lists, -1)
        self.together = max(1, min(j, WIDE // self.block))
        order, count = in_order(picks.blocks)
        self.count = (jnp.zeros_like(count) if columns_alone else count).reshape(-1, i)
        self.order = jnp.pad(order.reshape(-1, i, j), ((0, 0), (0, 0), (0, -j % self.together)))

    def cut(self, x: Float[Array, "B N T *_"]) -> Float[Array, "R I G S *_"]:
        """Cut an array with a row per query by lists of picks, and each into segments of queries."""
        b, n, _, *rest = x.shape
        return jnp.swapaxes(x.reshape(b * self.lists, n // self.lists, self.segments, -1, *rest), 1, 2)

    def joined(self, x: Float[Array, "R I G S *_"]) -> Float[Array, "B N T *_"]:
        """Invert `cut`."""
        return jnp.swapaxes(x, 1, 2).reshape(*self.shape[:3], *x.shape[4:])

    def row(self, r: Array) -> _Part:
        """Select the segments of one list of picks."""
        rows = jnp.full(self.segments, r)
        mine = self.q[r], self.q_pos[r // self.lists], self.blocks[r], self.order[r], self.count[r]
        return _Part(*mine, rows)

    def each(self, segment: Callable[[_Part], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Call `segment` for every segment: on a CPU one after the other, else for all lists at once."""
        rows = jnp.arange(self.q.shape[0], dtype=jnp.int32)
        if platform() == "cpu":
            return jax.lax.map(lambda r: jax.lax.map(segment, self.row(r)), rows)
        parts = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), jax.vmap(self.row)(rows))
        found = jax.lax.map(jax.vmap(segment), parts)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)

    def scores(self, queries: Float[Array, "Q H"], part: _Part, met: _Met) -> Float[Array, "Q S"]:
        """Logits of a segment's queries, -inf for keys that are invisible or do not count."""
        s = self.scale * jnp.dot(queries, met.k.T, preferred_element_type=wide(queries))
        s = s if self.softcap is None else self.softcap * jnp.tanh(s / self.softcap)
        live = (met.live & (met.pos >= 0))[None]
        seen = live & (met.pos[None] <= part.pos[:, None]) & (part.pos >= 0)[:, None]
        shape = *part.q.shape[:2], -1
        return jnp.where(seen[None], s.reshape(shape), NEG_INF).reshape(s.shape)

    def over(self, part: _Part, more: Callable[[Any, _Met], Any], state: Any) -> Any:
        """Fold `more` over all that was picked for a segment."""
        row = part.row // self.lists * self.heads + part.row % self.lists * self.heads // self.lists
        if self.columns is not None:
            state = more(state, self._columns(part, row))
        zero = jnp.zeros((), jnp.int32)
        size, inside = self.together, jnp.arange(self.block, dtype=jnp.int32)

        def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
            at, state = carry
            blocks = jax.lax.dynamic_slice(part.order, (at,), (size,))

            def cut(x: Array) -> Array:
                start = lambda i: (row, blocks[i] * self.block, *(zero,) * (x.ndim - 2))  # noqa: E731
                each = (1, self.block, *x.shape[2:])
                return jnp.concatenate([jax.lax.dynamic_slice(x, start(i), each)[0] for i in range(size)])

            live = jnp.repeat(at + jnp.arange(size, dtype=jnp.int32) < part.count, self.block)
            index = (blocks[:, None] * self.block + inside[None]).reshape(-1)
            return at + size, more(state, _Met(cut(self.k), cut(self.v), cut(self.k_pos), index, live))

        return jax.lax.while_loop(lambda c: c[0] < part.count, body, (jnp.zeros_like(part.count), state))[1]

    def _columns(self, part: _Part, row: Array) -> _Met:
        """Gather the single keys of a list of picks, without those in blocks that this segment picked."""
        assert self.columns is not None
        columns = self.columns[part.row]
        index = jnp.maximum(columns, 0)
        live = (columns >= 0) & ~part.blocks[index // self.block]
        return _Met(self.k[row, index], self.v[row, index], self.k_pos[row, index], index, live)
