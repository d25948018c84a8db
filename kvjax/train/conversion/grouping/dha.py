"""DHA: similar heads are shared, keys and values separately, and similar layers keep fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import plan, regroup
from kvjax.ops.base.dtypes import wide
from kvjax.train.conversion.convert import Grouping
from kvjax.train.conversion.grouping.products import HeadProducts, Products, canonical, check_plain, cosine


def dha(
    products: Sequence[HeadProducts], heads: int, losses: Float[np.ndarray, "L 2"] | None = None
) -> list[Grouping]:
    """Form groups of key heads and of value heads for every layer, `heads` of both in all (arXiv:2406.06567).

    Each layer's key heads, and its value heads, are merged by Ward's method: always the two groups whose
    union adds least to the summed squared distance of heads, at one length, from the mean of their group. The
    cost of successive merges never falls, so taking the cheapest merges of all layers until `heads` are left
    gives every layer the numbers of heads that cost least in sum, among all cuts of these trees. With
    `losses` (`fusion_losses`), the merges of a layer's keys, or values, cost as much as all of them together
    lose.

    Difference: DHA (Chen et al., 2024) learns what fusing heads costs by a fusion loss in a short training,
    forms its groups and the layers' budgets by that, and draws the heads of a group together as it trains on.
    Its observation, that similar heads fuse at little loss, is the measure here. It is a poor guide between
    layers: in `recall-tiny` with 12 of 16 heads, budgets by weights alone lose as much as the median of all
    70, or more, and those by `losses` are among the ten best. The paper's equations were out of reach.
    `kvjax.train.conversion.fusion.fused_groups` trains the heads of these groups to converge.

    Raises ValueError if `heads` is less than one key and one value head per layer, or more than there are.

    >>> like = HeadProducts(k=np.array([[1.0, 1.0], [1.0, 1.0]]), v=np.eye(2))
    >>> dha([like], 3)
    [Grouping(k=(0, 0), v=(0, 1), reads=None)]
    """
    trees = [merges(x) for layer in products for x in layer]
    most = sum(len(x) for layer in products for x in layer)
    if not len(trees) <= heads <= most:
        raise ValueError(
            f"{len(products)} layers cannot have {heads} key and value heads in all: "
            f"give {len(trees)} to {most}"
        )
    if losses is not None:
        if losses.shape != (len(products), 2):
            raise ValueError(f"losses has shape {losses.shape}, expected one of keys and values per layer")
        worth = np.maximum(losses, 0.0).ravel()
        trees = [
            (pairs, costs / (costs.sum() or 1.0) * x) for (pairs, costs), x in zip(trees, worth, strict=True)
        ]
    owner = np.concatenate([np.full(len(costs), i) for i, (_, costs) in enumerate(trees)])
    order = np.argsort(np.concatenate([costs for _, costs in trees]), kind="stable")
    done = np.bincount(owner[order[: most - heads]], minlength=len(trees))
    groups = [cut(pairs, count) for (pairs, _), count in zip(trees, done.tolist(), strict=True)]
    return [Grouping(k, v) for k, v in zip(groups[::2], groups[1::2], strict=True)]


def fusion_losses(
    params: Params, config: Config, loss: Callable[[Params], float]
) -> Float[np.ndarray, "L 2"]:
    """Compute the loss increase if all key heads (column 0) or value heads (1) of a layer become their mean.

    loss: a function of parameters of this config, over a few sequences; it is called 2 L + 1 times. Raises
    ValueError unless every layer is plain attention.
    """
    check_plain(config)
    layers = regroup(params, plan(config, stacked=False))["layers"]
    lost = np.zeros((config.layers, 2))
    for i, p in enumerate(layers):
        for j, leaf in enumerate("kv"):
            fused = {n: _fused(p[n], config) for n in (leaf, f"{leaf}_bias") if n in p}
            tree = {**params, "layers": (*layers[:i], p | fused, *layers[i + 1 :])}
            lost[i, j] = loss(regroup(tree, plan(config)))
    return lost - loss(params)


def _fused(w: Array, config: Config) -> Array:
    heads = w.reshape(*w.shape[:-1], config.kv_heads, config.head_dim)
    mean = heads.astype(wide(w)).mean(-2, keepdims=True).astype(w.dtype)
    return jnp.broadcast_to(mean, heads.shape).reshape(w.shape)


def merges(products: Products) -> tuple[Int[np.ndarray, "M 2"], Float[np.ndarray, "M"]]:
    """Ward's merges of a layer's heads, in order: which two groups, and the increase of the error.

    Groups are numbered after the heads: the i-th merge of K heads makes group K + i.

    >>> pairs, added = merges(np.eye(2))
    >>> pairs.tolist(), round(float(added[0]), 6)
    ([[0, 1]], 1.0)
    """
    if len(products) == 1:
        return np.zeros((0, 2), int), np.zeros(0)
    similar = cosine(products)
    squared = np.maximum(2 - 2 * similar, 0.0)
    np.fill_diagonal(squared, 0.0)
    tree = linkage(squareform(np.sqrt(squared), checks=False), method="ward")
    # Ward's distance is the root of twice the increase; rounding must not put a merge before its parts.
    return tree[:, :2].astype(int), np.maximum.accumulate(tree[:, 2] ** 2 / 2)


def cut(pairs: Int[np.ndarray, "M 2"], count: int) -> tuple[int, ...]:
    """Return the groups after the first `count` merges."""
    n = len(pairs) + 1
    group = np.arange(n)
    for i, pair in enumerate(pairs[:count]):
        group[np.isin(group, pair)] = n + i
    return canonical(group)
