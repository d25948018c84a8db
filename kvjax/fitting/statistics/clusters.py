"""Which heads of a layer attend alike (CHAI, arXiv:2403.08058)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from kvjax.api.prefill import padded
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys


def fit_clusters(
    model: Model,
    batches: list[list[list[int]]],
    *,
    least: float = 0.9,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit, for every query head [L, N], the head whose attention it shares.

    Heads of a layer are clustered by the correlation of their attention over all queries and the tokens that
    these see in the texts (section 3.2), by average linkage, as long as a cluster's heads have a mean
    correlation of at least `least`; each cluster is represented by the head that is most like all others in
    it. Raises InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "clusters of heads")
    total = None
    for rows in progress(batches):
        given = padded(model, rows, None)
        found = _moments(model.config, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))
        each = [np.asarray(x, np.float64) for x in found]
        total = each if total is None else [a + b for a, b in zip(total, each, strict=True)]
    assert total is not None
    count, sums, products = total
    mean = sums / count[:, None]
    spread = products / count[:, None, None] - mean[:, :, None] * mean[:, None]
    size = np.sqrt(np.maximum(np.einsum("lnn->ln", spread), 1e-30))
    source = np.stack([_clustered(c, least) for c in spread / size[:, :, None] / size[:, None]])
    return Fitted({"source": source.astype(np.int32)}, "ClusteredHeads", model.signature)


def _clustered(correlation: Float[np.ndarray, "N N"], least: float) -> Int[np.ndarray, "N"]:
    """Find the representative of each head's cluster.

    >>> _clustered(np.array([[1.0, 0.2, 0.95], [0.2, 1.0, 0.1], [0.95, 0.1, 1.0]]), 0.9).tolist()
    [0, 1, 0]
    """
    heads = len(correlation)
    if heads == 1:
        return np.zeros(1, int)
    apart = np.maximum(1 - (correlation + correlation.T) / 2, 0.0)
    np.fill_diagonal(apart, 0.0)
    cluster = fcluster(linkage(squareform(apart, checks=False), "average"), 1 - least, "distance")
    source = np.arange(heads)
    for number in np.unique(cluster):
        mine = np.flatnonzero(cluster == number)
        # Rounded, so that the first is chosen of heads that differ by rounding errors alone.
        source[mine] = mine[correlation[np.ix_(mine, mine)].sum(1).round(6).argmax()]
    return source


@partial(jax.jit, static_argnames=("config",))
def _moments(
    config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "L"], Float[Array, "L N"], Float[Array, "L N N"]]:
    """Over all pairs of a query and a token that it sees: their number, sum p, and sum p p' over heads."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    pairs = (at.pos + 1).sum().astype(jnp.float32)

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Any]:
        p = probabilities(s)
        out = jnp.einsum("bkgts,bksv->bkgtv", p, keys.v.astype(s.dtype)).reshape(*inputs.q.shape[:3], -1)
        each = jnp.where((at.pos >= 0)[:, None, :, None], p.reshape(*inputs.q.shape[:3], -1), 0.0)
        products = jnp.einsum("bnts,bmts->nm", each, each, precision="highest")
        return out, (pairs, each.sum((0, 2, 3)), products)

    collected = read_whole(config, params, tokens, at, attention, "clusters of heads").collected
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *collected)
