"""KVCrush: keeps some tokens that would be evicted, chosen so that heads rank them differently."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observed, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.scores.composite import over_heads
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class Representatives(Made):
    """inf for a head's best n - r slots, 1 for r representatives of the other slots, 0 for the rest.

    The newest `window` tokens are among the best (KVCrush, arXiv:2503.00022). A token's bits say which heads
    of the layer rank it among their best n. A head's other slots are ordered by how many of their bits differ
    from the anchor 0, 1, 0, 1, ... over the heads; of equals the older comes first. Of m such slots those at
    0, s, 2s, ... with s = m // r are the representatives; r = floor(share * n), but at most what the window
    leaves of the budget.
    """

    score: Score
    share: float
    window: int

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = view.pos >= 0
        newest = view.pos >= (seen.length - self.window)[:, None, None]
        score = jnp.where(newest, jnp.inf, scored(self.score, view, seen))
        place = ranks(jnp.where(live, score, -jnp.inf))
        # The bit of a head that does not hold the token is 0, as if it would evict it.
        anchor = (jnp.arange(live.shape[1]) % 2)[None, :, None].astype(jnp.float32)
        bits = (live & (place < seen.n[:, None, None])).astype(jnp.float32)
        apart = over_heads(view, jnp.where(live, jnp.abs(bits - anchor) - anchor, 0.0))
        spare = jnp.maximum(seen.n - self.window, 0)
        many = jnp.minimum((seen.n * round(self.share * 1000)) // 1000, spare)
        best = place < (seen.n - many)[:, None, None]
        others = live & ~best
        order = ranks(jnp.where(others, -apart, -jnp.inf))
        step = jnp.maximum(others.sum(-1, keepdims=True) // jnp.maximum(many, 1)[:, None, None], 1)
        picked = others & (order % step == 0) & (order // step < many[:, None, None])
        return jnp.where(best, jnp.inf, picked.astype(jnp.float32))
