"""Attention of many tokens that pick the tokens they attend to, some queries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.mixer import Projected
from kvjax.models.picking import Picking
from kvjax.models.picking_blocks import BlockPicking
from kvjax.ops.attention.union import Keys, Masses, Reduction, attend, newer_queries

# Queries whose logits over all slots are in memory at once.
QUERIES = 256


def attend_picked(
    x: Projected, q: Float[Array, "B N T H"], sets: Sequence[Keys], pos: Int[Array, "B T"],
    mass: tuple[Reduction, ...], **options: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:  # fmt: skip
    """Return (out, lse, masses) of queries over stored sets, whose keys and values are expanded first.

    options: scale, window and softcap of `attend`. Queries are taken some at a time, unless masses are
    recorded.
    """
    picking, t = x.picking, q.shape[2]
    assert picking is not None
    if x.expand is not None:
        q, computed = x.expand.queries(q), x.expand.sets(sets)
    else:
        computed = [*sets]

    def some(
        q: Array, pos: Array, picking: Picking | BlockPicking
    ) -> tuple[Array, Array, tuple[Masses, ...], Array]:
        seen, found = picking.pick(q, sets, pos, options["window"])
        chosen = [s._replace(seen=one) for s, one in zip(computed, seen, strict=True)]
        newer = newer_queries(pos, mass)
        out, lse, masses = attend(q, chosen, pos, mass=mass, newer=newer, **options)
        return out, lse, masses, found

    if mass or t <= QUERIES:
        out, lse, masses, found = some(q, pos, picking)
        picking.leave(found)
        return out, lse, masses

    def body(part: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, pos, *own = part
        out, lse, _, found = some(
            jnp.swapaxes(q, 1, 2), pos, picking._replace(**dict(zip(each, own, strict=True)))
        )
        return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2), found

    each = picking.per_query()
    parts = [jnp.swapaxes(q, 1, 2), pos, *each.values()]
    out, lse, found = jax.lax.map(body, tuple(_in_parts(y, i == 1) for i, y in enumerate(parts)))
    out, lse, found = (jnp.swapaxes(y, 0, 1) for y in (out, lse, found))
    out, lse, found = (y.reshape(y.shape[0], -1, *y.shape[3:])[:, :t] for y in (out, lse, found))
    picking.leave(found)
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2), ()


def _in_parts(y: Array, places: bool) -> Array:
    """[B, T, ...] as [parts, B, QUERIES, ...], padded by 0; if y has positions (`places`), by -1."""
    short = -y.shape[1] % QUERIES
    y = jnp.pad(y, ((0, 0), (0, short), *((0, 0),) * (y.ndim - 2)), constant_values=-1 if places else 0)
    return jnp.swapaxes(y.reshape(y.shape[0], -1, QUERIES, *y.shape[2:]), 0, 1)
