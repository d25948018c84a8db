"""Reading by centroids: keys are clustered, whole or in parts, and ranked by their centroids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.read_kinds import Learning
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.largest import first_largest
from kvjax.read.ranked import RankedSlots, summed
from kvjax.state.cache import Slots


def k_means(
    x: Float[Array, "*b S H"], live: Bool[Array, "*b S"], count: int, turns: int,
    root: Float[Array, "*b H H"] | None = None,
) -> Float[Array, "*b C H"]:  # fmt: skip
    """Centroids of the live rows of x after `turns` iterations of Lloyd's algorithm (1982).

    They start as evenly spaced live rows. A centroid that is nearest to no row does not move. root: distances
    are those of x @ root; None is the identity.

    >>> x = jnp.asarray([[0.0], [1.0], [9.0], [11.0], [5.0]])
    >>> k_means(x, jnp.arange(5) < 4, 2, 3).tolist()
    [[0.5], [10.0]]
    """
    many = live.sum(-1, dtype=jnp.int32)[..., None]
    odd = (2 * jnp.arange(count, dtype=jnp.int32) + 1).reshape(*(1,) * (many.ndim - 1), -1)
    rows = jnp.argsort(~live, axis=-1, stable=True)
    start = jnp.take_along_axis(rows, odd * many // (2 * count), axis=-1)
    start = jnp.take_along_axis(x, start[..., None], axis=-2)

    def turn(_: int | Array, centroids: Float[Array, "*b C H"]) -> Float[Array, "*b C H"]:
        mine = jax.nn.one_hot(nearest_centroid(x, centroids, root), count, axis=-2, dtype=x.dtype)
        mine = mine * live[..., None, :].astype(x.dtype)
        held = mine.sum(-1)[..., None]
        total = jnp.einsum("...cs,...sh->...ch", mine, x, precision="highest")
        return jnp.where(held > 0, total / jnp.maximum(held, 1), centroids)

    return jax.lax.fori_loop(0, turns, turn, start)


def nearest_centroid(
    x: Float[Array, "*b S H"], centroids: Float[Array, "*b C H"], root: Float[Array, "*b H H"] | None = None
) -> Int[Array, "*b S"]:
    """Find the index of the nearest centroid, the first one of equals; root: as in `k_means`."""
    if root is not None:
        x, centroids = (
            jnp.einsum("...sh,...hi->...si", y, root, precision="highest") for y in (x, centroids)
        )
    product = jnp.einsum("...ch,...sh->...cs", centroids, x, precision="highest")
    return first_largest(2 * product - (centroids**2).sum(-1)[..., None], -2)[0]


@dataclasses.dataclass(frozen=True)
class ProductCodes(RankedSlots, Learning):
    """PQCache (arXiv:2407.12820, section 3): product quantisation codes approximate the logits of all keys.

    A key's channels are cut into `parts` equal parts, and each is encoded as the nearest of 2^bits centroids,
    which are fitted to the keys at the end of the last prefill (`k_means`). Logits are those of the
    centroids.
    Raises ValueError for bits outside 1 to 8.
    """

    parts: int = 2
    bits: int = 6
    turns: int = 10
    by_list = True

    def __post_init__(self):
        if not 1 <= self.bits <= 8:
            raise ValueError(f"a part's code has 1 to 8 bits, got {self.bits!r}")

    def _cut(self, x: Float[Array, "*b H"]) -> Float[Array, "*b m w"]:
        if x.shape[-1] % self.parts:
            raise ValueError(f"parts={self.parts} must divide the {x.shape[-1]} channels of a head")
        return x.reshape(*x.shape[:-1], self.parts, -1)

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Learn the centroids [*b, parts, C, H / parts], in promote(float32, k)."""
        x = jnp.moveaxis(self._cut(jax.lax.stop_gradient(k.astype(wide(k)))), -2, -3)
        live = jnp.broadcast_to((pos >= 0)[..., None, :], x.shape[:-1])
        return {"centroids": k_means(x, live, 2**self.bits, self.turns)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """One byte for every part of a key."""
        if learnt is None:
            return {"codes": jnp.zeros((*k.shape[:-1], self.parts), jnp.uint8)}
        x = jnp.moveaxis(self._cut(k.astype(wide(k))), -2, -3)
        codes = nearest_centroid(x, learnt["centroids"])
        return {"codes": jnp.swapaxes(codes, -1, -2).astype(jnp.uint8)}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        codes, centroids = body.summary["codes"][layer], body.sums["centroids"][layer]
        mine = self._cut(summed(q, codes.shape[1]))
        table = jnp.einsum("bkmw,bkmcw->bkmc", mine, centroids, precision="highest")
        return jnp.take_along_axis(table, jnp.swapaxes(codes, -1, -2).astype(jnp.int32), -1).sum(2)


@dataclasses.dataclass(frozen=True)
class Clusters(RankedSlots, Learning):
    """ClusterKV (arXiv:2412.03213, section 3): reads the clusters whose centroids match the queries best.

    Keys of similar direction form a cluster: `clusters` centroids are fitted to the unit keys at the end of
    the last prefill (`k_means`), and a newer key belongs to the nearest one. Slots are read in the order of
    <q, centroid>, cluster by cluster; of a cluster that fits only in part, the older slots are read. The
    first `sinks` tokens are always read.
    """

    clusters: int = 64
    turns: int = 10
    sinks: int = 16
    by_list = True

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Learn the centroids [*b, C, H], in promote(float32, k)."""
        unit = unit_rows(jax.lax.stop_gradient(k.astype(wide(k))))
        return {"centroids": k_means(unit, pos >= 0, self.clusters, self.turns)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Find the index of every key's cluster."""
        if learnt is None:
            return {"cluster": jnp.zeros(k.shape[:-1], jnp.uint16)}
        cluster = nearest_centroid(unit_rows(k.astype(wide(k))), learnt["centroids"])
        return {"cluster": cluster.astype(jnp.uint16)}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        cluster, centroids = body.summary["cluster"][layer].astype(jnp.int32), body.sums["centroids"][layer]
        met = jnp.einsum("bkh,bkch->bkc", summed(q, cluster.shape[1]), centroids, precision="highest")
        pos = body.pos[layer]
        first = (pos >= 0) & (pos < self.sinks)
        return jnp.where(first, jnp.inf, jnp.take_along_axis(met, cluster, -1))


@dataclasses.dataclass(frozen=True)
class WeighedClusters(Clusters):
    """Squeezed Attention (arXiv:2411.09688, section 3): clusters by the share of attention of a key.

    A key of cluster c counts as the mean C_c of its raw keys: its share is S_c = exp(q C_c / sqrt(H)) / sum_j
    N_j exp(q C_j / sqrt(H)), with N_j keys in cluster j, averaged over the heads of a group. Keys are
    clustered by their directions, as in `Clusters`, and C and N are of the keys at the end of the last
    prefill; a newer key belongs to the cluster of the nearest direction.
    """

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Directions and means [*b, C, H] and counts [*b, C], in promote(float32, k)."""
        found = super().learn(k, pos)
        x = jax.lax.stop_gradient(k.astype(wide(k)))
        mine = jax.nn.one_hot(
            nearest_centroid(unit_rows(x), found["centroids"]), self.clusters, dtype=x.dtype
        )
        mine = jnp.where((pos >= 0)[..., None], mine, 0)
        counts = mine.sum(-2)
        means = jnp.einsum("...sc,...sh->...ch", mine, x, precision="highest")
        return found | {"means": means / jnp.maximum(counts, 1)[..., None], "counts": counts}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        cluster = body.summary["cluster"][layer].astype(jnp.int32)
        means, counts = (body.sums[name][layer] for name in ("means", "counts"))
        b, heads, h = q.shape[0], cluster.shape[1], q.shape[-1]
        rows = q.reshape(b, heads, -1, h).astype(wide(q)) / h**0.5
        met = jnp.einsum("bkrh,bkch->bkrc", rows, means.astype(rows.dtype), precision="highest")
        held = jnp.broadcast_to(counts[:, :, None], met.shape)
        all_of_it = jax.nn.logsumexp(met, -1, b=held, keepdims=True)
        share = jnp.exp(met - all_of_it).mean(2)
        pos = body.pos[layer]
        first = (pos >= 0) & (pos < self.sinks)
        return jnp.where(first, jnp.inf, jnp.take_along_axis(share, cluster, -1))


def unit_rows(x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    """Normalise rows to directions; 0 for a row of zeros."""
    return x * jax.lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), 1e-24))
