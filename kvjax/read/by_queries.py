"""Reading by an index that a prompt's queries shape: keys are near each other if queries treat them alike."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.read_kinds import LearningFromQueries, Placing
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import one_by_one
from kvjax.read.centroids import k_means, nearest_centroid
from kvjax.read.ranked import RankedSlots, summed
from kvjax.state.cache import Slots
from kvjax.state.codes import dense


def query_root(q: Float[Array, "B N W H"], at: Int[Array, "B W"], heads: int) -> Float[Array, "B K H H"]:
    """Compute the symmetric root of E[q q'] over a group's queries; queries with at = -1 do not count.

    |x root|^2 is then the mean square of the products of x with these queries.

    >>> q = jnp.asarray([[[[3.0, 0.0], [0.0, 0.0], [9.0, 9.0]]]])
    >>> jnp.round(query_root(q, jnp.asarray([[0, 1, -1]]), 1), 3).tolist()
    [[[[2.121000051498413, 0.0], [0.0, 0.0]]]]
    """
    b, n, w, h = q.shape
    rows = jnp.where((at >= 0)[:, None, :, None], q, 0).reshape(b, heads, n // heads * w, h).astype(wide(q))
    many = jnp.maximum((at >= 0).sum(-1) * (n // heads), 1).astype(rows.dtype)
    moment = jnp.einsum("bkrh,bkri->bkhi", rows, rows, precision="highest") / many[:, None, None, None]

    def root(x: Float[Array, "*b H H"]) -> Float[Array, "*b H H"]:
        sizes, vectors = jnp.linalg.eigh(x)
        scaled = vectors * jnp.sqrt(jnp.maximum(sizes, 0))[..., None, :]
        return jnp.einsum("...ij,...kj->...ik", scaled, vectors, precision="highest")

    return one_by_one(root, moment)


@dataclasses.dataclass(frozen=True)
class QueryClusters(RankedSlots, LearningFromQueries):
    """Reads the slots whose centroids have the largest products with a query, fitted to such products.

    The `clusters` centroids minimise sum_k E[(q (k - c_k))^2] = sum_k (k - c_k)' E[q q'] (k - c_k) over the
    keys at the end of the last prefill and its newest `asks` queries (`k_means` in that metric); a newer key
    belongs to the nearest one. Slots rank by <q, c>, summed over the heads of a group; the first `sinks`
    tokens are always read.
    """

    clusters: int = 64
    turns: int = 10
    sinks: int = 4
    asks: int = 64
    by_list = True

    def learn(
        self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"],
        asked: tuple[Float[Array, "B N W H"], Int[Array, "B W"]],
    ) -> dict[str, Array]:  # fmt: skip
        """Compute the root [B, K, H, H] of the metric and centroids [B, K, C, H], in promote(float32, k)."""
        x, (q, at) = jax.lax.stop_gradient(k.astype(wide(k))), asked
        root = query_root(jax.lax.stop_gradient(q), at, k.shape[1]).astype(x.dtype)
        return {"root": root, "centroids": k_means(x, pos >= self.sinks, self.clusters, self.turns, root)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Find the index of every key's cluster."""
        if learnt is None:
            return {"cluster": jnp.zeros(k.shape[:-1], jnp.uint16)}
        cluster = nearest_centroid(k.astype(wide(k)), learnt["centroids"], learnt["root"])
        return {"cluster": cluster.astype(jnp.uint16)}

    def met(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K C"]:
        """Compute the products of queries with centroids, summed over the heads of a group."""
        centroids = body.sums["centroids"][layer]
        return jnp.einsum("bkh,bkch->bkc", summed(q, centroids.shape[1]), centroids, precision="highest")

    def of_slots(self, x: Float[Array, "B K C"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        """Numbers of clusters as those of their slots; infinite for sinks."""
        pos, cluster = body.pos[layer], body.summary["cluster"][layer].astype(jnp.int32)
        first = (pos >= 0) & (pos < self.sinks)
        return jnp.where(first, jnp.inf, jnp.take_along_axis(x, cluster, -1))

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        return self.of_slots(self.met(q, body, layer), body, layer)


@dataclasses.dataclass(frozen=True)
class ScannedClusters(QueryClusters):
    """RetrievalAttention (arXiv:2409.10516, section 3): the keys to which an index for queries leads.

    The share `scan` of the clusters (`QueryClusters`), those whose centroids have the largest products with a
    query, is scanned, and of their slots those with the largest <q, k> are read, summed over the heads of a
    group, with the first `sinks` tokens.

    >>> from kvjax.words import Budget
    >>> ScannedClusters(Budget(0.1), clusters=64, scan=0.25).scanned
    16
    """

    scan: float = 0.25

    @property
    def scanned(self) -> int:
        """How many clusters a query scans."""
        return math.ceil(self.scan * self.clusters)

    def looks_at(self, width: int) -> int:
        """Count the channels of every key read on average: all `width` of the keys that are scanned."""
        return math.ceil(width * self.scanned / self.clusters)

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        k = dense(jax.tree.map(lambda x: x[layer], body.k))
        exact = jnp.einsum("bkh,bksh->bks", summed(q, k.shape[1]), k.astype(wide(q)))
        there = self.of_slots(self._best(q, body, layer).astype(exact.dtype), body, layer)
        return jnp.where(there == 0, -jnp.inf, jnp.where(jnp.isinf(there), jnp.inf, exact))

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the best of the slots that are scanned, and say how many of them count."""
        slots, counts = super().select(q, body, layer, length, implementation)
        there = self.of_slots(self._best(q, body, layer).astype(jnp.float32), body, layer) > 0
        found = (there & (body.pos[layer] >= 0)).sum(-1, dtype=jnp.int32)
        return slots, jnp.minimum(counts, found)

    def _best(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Bool[Array, "B K C"]:
        """Which clusters are scanned."""
        met = jax.lax.stop_gradient(self.met(q, body, layer))
        _, best = jax.lax.top_k(met, self.scanned)
        return jax.nn.one_hot(best, self.clusters, dtype=bool).any(-2)


@dataclasses.dataclass(frozen=True)
class WindowedCodes(QueryClusters, Placing):
    """A2ATS (arXiv:2502.12665): slots by codes of unrotated keys, all of them at one distance from a query.

    Slots before the `newest` tokens stand at the distance `newest` from every query, wherever they are in the
    text (windowed RoPE), so that a query's product with a centroid of unrotated keys does not depend on
    positions. Centroids are those of `QueryClusters` for queries at that distance.

    >>> from kvjax.words import Budget
    >>> pos, end, at = (jnp.asarray([[x]]) for x in ([8, 9, -1], [20], [29]))
    >>> WindowedCodes(Budget(4), newest=8).places(pos, end, at).tolist()
    [[[21, 21, 21]]]
    """

    @property
    def apart(self) -> int:
        return self.newest

    def places(
        self, pos: Int[Array, "B K P"], end: Int[Array, "B K 1"], at: Int[Array, "B 1 1"]
    ) -> Int[Array, "B K P"]:
        """Return the position `newest` tokens before the query."""
        return jnp.broadcast_to(jnp.maximum(at - self.newest, 0), pos.shape)
