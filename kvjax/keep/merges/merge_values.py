"""A merge of values alone: an evicted value is blended into the value of the nearest kept key."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.grammar.kinds import Merge, Observed, View
from kvjax.keep.merges.merge import nearest, pick


@dataclasses.dataclass(frozen=True)
class ValueBlend(Merge):
    """v_c = (v_c + sum_e w_e v_e) / (1 + sum_e w_e) over the evicted slots e whose nearest kept slot is c.

    Nearest means the largest cosine of keys; w_e = max(cosine, 0) |v_e| / (|v_e| + |v_c|). A slot whose
    cosine is below `threshold` is dropped. Keys stay as they are. This is the rule of kvpress'
    MergingPress, and of no paper; there, `merge_fraction` can leave out the least similar slots.
    """

    threshold: float = 0.0
    writes = ("v",)

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Blend the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots, v = view.pos.shape[-1], view.v.astype(jnp.float32)
        index = jnp.minimum(leaving, slots - 1)
        k = view.k.astype(jnp.float32)
        target, cosine = nearest(pick(k, index), k, kept)
        blends = (leaving < slots) & (cosine >= self.threshold)
        # sqrt has no finite gradient at 0.
        size = jnp.sqrt(jnp.maximum((v * v).sum(-1), 1e-24))
        mine, theirs = pick(size, index), pick(size, jnp.minimum(target, slots - 1))
        weight = jnp.where(blends, jnp.maximum(cosine, 0.0) * mine / (mine + theirs + 1e-6), 0.0)
        add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
        at = jnp.where(blends, target, slots)
        total = add(jnp.zeros(view.pos.shape, jnp.float32), at, weight)
        sum_v = add(jnp.zeros(v.shape, jnp.float32), at, weight[..., None] * pick(v, index))
        blended = (v + sum_v) / (1.0 + total[..., None])
        return view._replace(v=jnp.where((total > 0)[..., None], blended, v).astype(view.v.dtype))
