"""Queries that pick the tokens they attend to, by small keys of their own (lightning indexers)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.picking_blocks import BlockPicking
from kvjax.ops.attention.union import NEG_INF, Keys, visible
from kvjax.ops.base.dtypes import wide

# Positions of picked tokens, ascending; -1 where a query sees fewer tokens. One row serves all queries that
# pick everything.
Picked = Int[Array, "B _ M"]


class Picking(NamedTuple):
    """How the queries of a layer pick tokens: the `top` largest of I(t, s) = sum_h w_th relu(q_th k_s).

    queries: q, rotated, of every token and index head. weights: w. first: the channel of a stored key from
    which on it is k, not rotated. turn: rotates k by the positions of its slots. taken: the tokens that a
    layer below picked, in place of all these. found: gets what was picked, for layers above.
    """

    top: int
    queries: Float[Array, "B T I D"] | None = None
    weights: Float[Array, "B T I"] | None = None
    first: int = 0
    turn: Callable[[Array, Array], Array] = lambda k, pos: k
    taken: Picked | None = None
    found: list[Picked] | None = None

    def alike(self, sets: Sequence[Keys]) -> bool:
        """Whether every query picks all of these slots, because there are no more than `top`."""
        return sum(s.k.shape[2] for s in sets) <= self.top

    def leave(self, picked: Picked) -> None:
        """Hand on what was picked, if layers above take it."""
        if self.found is not None:
            self.found.append(picked)

    def per_query(self) -> dict[str, Array]:
        """Return the fields with an entry for every query."""
        own = {"queries": self.queries, "weights": self.weights}
        own |= {"taken": self.taken} if self.taken is not None and self.taken.shape[1] > 1 else {}
        return {name: x for name, x in own.items() if x is not None}

    def pick(
        self, q: Float[Array, "B N T H"], sets: Sequence[Keys], pos: Int[Array, "B T"], window: int | None
    ) -> tuple[list[Bool[Array, "B T _"]], Picked]:
        """Pick as `picked`, the same for all heads, by queries of its own."""
        return picked(self, sets, pos, window)


def all_of(places: Sequence[Int[Array, "_ 1 S"]], rows: int) -> Picked:
    """Return what every query picks where it picks all slots, given the positions of each set."""
    return jnp.sort(jnp.concatenate([jnp.repeat(p, rows // p.shape[0], 0) for p in places], -1))


def picked(
    picking: Picking, sets: Sequence[Keys], pos: Int[Array, "B T"], window: int | None = None
) -> tuple[list[Bool[Array, "B T _"]], Picked]:
    """Mark the slots that each query picks from all sets, and find their positions.

    sets: the slots of one KV head, in parts. window: that of the layer's attention, which hides other texts
    of a row, too: a query picks only tokens that it sees. Of equal scores the older tokens are picked,
    wherever they lie.
    """
    places = jnp.concatenate([s.pos[:, 0] for s in sets if s.pos is not None], -1)
    ends = [int(n) for n in np.cumsum([s.k.shape[2] for s in sets])[:-1]]
    if picking.taken is not None:
        hit = _among(picking.taken, places, pos.shape[1])
        return jnp.split(hit, ends, -1), picking.taken
    score = jax.lax.stop_gradient(jnp.concatenate([_scores(picking, s, pos, window) for s in sets], -1))
    best, slots = _largest(score, places, min(picking.top, score.shape[-1]))
    there = best > NEG_INF
    hit = jax.vmap(jax.vmap(lambda row, at, on: row.at[at].set(on)))(
        jnp.zeros(score.shape, bool), slots, there
    )
    found = jax.vmap(lambda row, at: row[at])(places, slots)
    return jnp.split(hit, ends, -1), jnp.sort(jnp.where(there, found, -1), -1)


def _largest(
    score: Float[Array, "B T S"], places: Int[Array, "B S"], count: int
) -> tuple[Float[Array, "B T M"], Int[Array, "B T M"]]:
    """Find the `count` largest scores and their slots; of equal ones those of the older tokens.

    Scores of few heads are often 0, where relu leaves nothing, and slots are in no order: sinks, codes and
    places that evicted slots left come before older or after newer ones.
    """
    best, slots = jax.lax.top_k(score, count)
    least = best[..., -1:]

    def older_first() -> Int[Array, "B T M"]:
        age = jnp.where(score == least, -places[:, None], jnp.iinfo(jnp.int32).min)
        older = jax.lax.top_k(age, count)[1]
        above = (best > least).sum(-1, keepdims=True, dtype=jnp.int32)
        rank = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), slots.shape)
        return jnp.where(
            rank < above, slots, jnp.take_along_axis(older, jnp.maximum(rank - above, 0), axis=-1)
        )

    left_out = ((score >= least).sum(-1, keepdims=True) > count) & (least > NEG_INF)
    return best, jax.lax.cond(left_out.any(), older_first, lambda: slots)


def _scores(
    picking: Picking, keys: Keys, pos: Int[Array, "B T"], window: int | None
) -> Float[Array, "B T S"]:
    """Compute I(t, s) of a set in promote(float32, q), -inf where a query sees no token."""
    assert picking.queries is not None and picking.weights is not None and keys.pos is not None
    k = picking.turn(keys.k[..., picking.first :], jnp.maximum(keys.pos, 0))[:, 0]
    dtype = wide(picking.queries)
    products = jnp.einsum("btid,bsd->btis", picking.queries, k, preferred_element_type=dtype)
    score = jnp.einsum("bti,btis->bts", picking.weights.astype(dtype), jax.nn.relu(products))
    return jnp.where(visible(pos, keys.pos, window, keys.until)[:, 0], score, NEG_INF)


def _among(taken: Picked, places: Int[Array, "B S"], queries: int) -> Bool[Array, "B T S"]:
    """Whether the tokens of slots are among those that each query takes."""

    def one(taken: Int[Array, "M"], places: Int[Array, "S"]) -> Array:
        at = jnp.minimum(jnp.searchsorted(taken, places), taken.shape[0] - 1)
        return (taken[at] == places) & (places >= 0)

    hit = jax.vmap(jax.vmap(one, (0, None)))(taken, places)
    return jnp.broadcast_to(hit, (hit.shape[0], queries, hit.shape[2]))


def marked(
    picking: Picking | BlockPicking,
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    pos: Int[Array, "B T"],
    window: int | None,
) -> list[Keys]:
    """Mark in the sets what each query picks of them; hand on what was picked."""
    seen, found = picking.pick(q, sets, pos, window)
    picking.leave(found)
    return [s._replace(seen=one) for s, one in zip(sets, seen, strict=True)]
