"""Reading by clusters of which the best are read, the next ones estimated, and the others left out."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Counted, EstimatingRest
from kvjax.ops.base.dtypes import wide
from kvjax.read.centroids import Clusters, k_means, nearest_centroid, unit_rows
from kvjax.read.ranked import summed
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class EstimatedClusters(Clusters, EstimatingRest):
    """RetroInfer (arXiv:2505.02922, section 4): the best clusters are read, the next ones by their sums.

    Keys are clustered by their directions from their centre, the mean of the prompt's keys, and a newer key
    belongs to the nearest one. Clusters are ranked by <q, m_c>, with m_c the mean of the keys of cluster c,
    summed over the heads of a group. Of the best ones as many are read as fit whole into the budget, after
    the first `sinks` tokens; of the next ones the share `estimate` of all clusters counts as n_c slots of key
    m_c and of their mean value; the others are left out. Counts and sums of keys and values follow the slots
    that come and leave.
    """

    estimate: float = 0.25

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Learn the centre [*b, H] of keys and directions [*b, C, H] from it, in promote(float32, k)."""
        x, live = jax.lax.stop_gradient(k.astype(wide(k))), pos >= self.sinks
        total = jnp.where(live[..., None], x, 0).sum(-2)
        centre = total / jnp.maximum(live.sum(-1), 1)[..., None].astype(x.dtype)
        unit = unit_rows(x - centre[..., None, :])
        return {"centre": centre, "centroids": k_means(unit, live, self.clusters, self.turns)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Find the index of every key's cluster."""
        if learnt is None:
            return super().summarise(k)
        unit = unit_rows(k.astype(wide(k)) - learnt["centre"][..., None, :])
        return {"cluster": nearest_centroid(unit, learnt["centroids"]).astype(jnp.uint16)}

    def total(self, held: Counted) -> dict[str, Array]:
        """Per cluster, the sums of keys and values [*b, C, _], and counts [*b, C], without sinks."""
        mine = jax.nn.one_hot(held.summary["cluster"], self.clusters, dtype=wide(held.k))
        mine = jnp.where((held.pos >= self.sinks)[..., None], mine, 0)

        def sums(x: Float[Array, "*b S _"]) -> Float[Array, "*b C _"]:
            return jnp.einsum("...sc,...sh->...ch", mine, x.astype(mine.dtype), precision="highest")

        return {"keys": sums(held.k), "values": sums(held.v), "counts": mine.sum(-2)}

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the sinks and the slots of the best clusters that fit whole, and count these."""
        live, pos = body.pos[layer] >= 0, body.pos[layer]
        rank, read, _ = self._zones(q, body, layer)
        cluster = body.summary["cluster"][layer].astype(jnp.int32)
        mine = jnp.take_along_axis(rank, cluster, -1)
        first = live & (pos < self.sinks)
        order = jnp.where(first, 1, jnp.where(live, -mine, -self.clusters))
        _, slots = jax.lax.top_k(order, self.pages_visited(body.capacity))
        chosen = first | (live & jnp.take_along_axis(read, cluster, -1))
        full = live.sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(chosen.sum(-1, dtype=jnp.int32), self.budget.count(full))

    def _zones(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array
    ) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"], Bool[Array, "B K C"]]:
        """Rank every cluster; return also whether it is read, or estimated; empty ones are neither."""
        live, counts = body.pos[layer] >= 0, jnp.round(body.sums["counts"][layer]).astype(jnp.int32)
        met = jnp.einsum("bkh,bkch->bkc", summed(q, counts.shape[1]), self._means(body, layer))
        order = jnp.argsort(jnp.where(counts > 0, -jax.lax.stop_gradient(met), jnp.inf), -1, stable=True)
        rank = jnp.argsort(order, -1).astype(jnp.int32)
        first = (live & (body.pos[layer] < self.sinks)).sum(-1, dtype=jnp.int32)
        room = self.budget.count(live.sum(-1, dtype=jnp.int32)) - first
        fits = jnp.cumsum(jnp.take_along_axis(counts, order, -1), -1, dtype=jnp.int32) <= room[..., None]
        many = fits.sum(-1, dtype=jnp.int32)[..., None]
        some = counts > 0
        next_ones = (rank >= many) & (rank < many + math.ceil(self.estimate * self.clusters))
        return rank, some & (rank < many), some & next_ones

    def _means(self, body: Slots, layer: int | Array) -> Float[Array, "B K C H"]:
        keys, counts = body.sums["keys"][layer], body.sums["counts"][layer]
        return keys / jnp.maximum(counts, 1)[..., None]

    def rest(
        self, q: Float[Array, "B N T H"], body: Slots, tail: Slots, layer: int | Array,
        chosen: tuple[Int[Array, "B K M"], Int[Array, "B K"]], lse: Float[Array, "B N T"],
        attention: AttentionSpec,
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:  # fmt: skip
        """Return (out, lse) of the clusters that are estimated."""
        counts, means = body.sums["counts"][layer], self._means(body, layer)
        (b, n, t, h), heads = q.shape, counts.shape[1]
        rows = q.reshape(b, heads, n // heads * t, h).astype(wide(q))
        s = jnp.einsum("bkrh,bkch->bkrc", rows, means.astype(rows.dtype)) * attention.scale
        if attention.softcap is not None:
            s = attention.softcap * jnp.tanh(s / attention.softcap)
        *_, estimated = self._zones(q, body, layer)
        estimated = jnp.broadcast_to(estimated[:, :, None], s.shape)
        some = jnp.maximum(counts, 1)[:, :, None].astype(s.dtype)
        s = jnp.where(estimated, s + jnp.log(some), -jnp.inf)
        left = jax.nn.logsumexp(s, -1, where=estimated)
        p = jnp.where(estimated, jnp.exp(s - jnp.where(jnp.isneginf(left), 0.0, left)[..., None]), 0.0)
        values = body.sums["values"][layer] / jnp.maximum(counts, 1)[..., None]
        out = jnp.einsum("bkrc,bkcv->bkrv", p, values.astype(p.dtype))
        return out.reshape(b, n, t, -1).astype(q.dtype), left.reshape(lse.shape).astype(lse.dtype)
