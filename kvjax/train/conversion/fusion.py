"""Fuses heads by weighted sums with trained weights: WGQA, and DHA's fusion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import plan, regroup
from kvjax.train.conversion.by_predictions import TokenRows, learn
from kvjax.train.conversion.convert import Grouping, group_heads, pool_heads

# [layer, KV head i, KV head j]: the weight of head j's projection in head i's.
Fusion = Float[Array, "L K K"]


def weighted_groups(
    params: Params, config: Config, kv_heads: int, texts: TokenRows, steps: int
) -> tuple[Params, Config]:
    """WGQA (arXiv:2407.10855): every new KV head is a weighted sum of its group, with trained weights.

    They start at 1 / group size, which is GQA, and the result decodes as GQA. Difference: the paper trains
    them with all other weights, on texts; here they alone are trained, on the original's predictions.
    One weight per head is the paper's plain form; it also has one per row and per column.

    Raises ValueError if heads do not divide or there are no texts.

    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=4, head_dim=4, d_ff=32)
    >>> made, smaller = weighted_groups(init(config, jax.random.key(0)), config, 2, [[1, 2, 3]], steps=1)
    >>> smaller.kv_heads
    2
    """
    _, smaller = pool_heads(params, config, kv_heads)
    start = jnp.full((config.layers, config.kv_heads), kv_heads / config.kv_heads, jnp.float32)

    def build(weights: dict[str, Array], _: Array) -> Params:
        return pool_heads(params, config, kv_heads, weights["k"], weights["v"])[0]

    found = learn({"k": start, "v": start}, build, smaller, (params, config), texts, steps)
    return pool_heads(params, config, kv_heads, found["k"], found["v"])


def fused_groups(
    params: Params, config: Config, groupings: list[Grouping], texts: TokenRows, steps: int
) -> tuple[Params, Config]:
    """DHA's linear fusion (arXiv:2406.06567): the heads of a group converge during training.

    Head i of a group projects with sum_j w_ij W_j over its group. With w the identity, the model is the
    original; at the end the rows of w in a group are equal, and so are the heads. In between, the divergence
    from the original's predictions plus

        l1 (F - t) + l2 (F - t)^2,  F = mean over heads i of |w_i - mean of its group's|^2

    is minimised, an augmented Lagrangian: t falls linearly from the first F to 0, and l1, l2 grow with the
    constraint's violation. Heads that still differ at the end are averaged. Differences: the paper's text was
    not at hand, and its summaries name a fusion loss and such a Lagrangian, not their constants; the paper
    trains all weights on texts, and this trains the fusion alone, on the original's predictions.

    Raises ValueError if there are no texts.
    """
    member = {leaf: _member(groupings, leaf) for leaf in "kv"}
    eye = jnp.broadcast_to(jnp.eye(config.kv_heads, dtype=jnp.float32), member["k"].shape)
    first = sum(_spread(eye, member[leaf]) for leaf in "kv")

    def extra(choice: dict[str, Array], over: Float[Array, ""]) -> Array:
        missed = sum(_spread(choice[leaf], member[leaf]) for leaf in "kv") - first * (1 - over)
        l1, l2 = (_rising(choice[name]) for name in ("l1", "l2"))
        return l1 * missed + l2 * jnp.square(missed)

    def build(choice: dict[str, Array], _: Array) -> Params:
        return _fused(params, config, {leaf: choice[leaf] * member[leaf] for leaf in "kv"})

    start = {"k": eye, "v": eye, "l1": jnp.zeros((), jnp.float32), "l2": jnp.ones((), jnp.float32)}
    found = learn(start, build, config, (params, config), texts, steps, extra=extra)
    k, v = (_weights(found[leaf], member[leaf]) for leaf in "kv")
    return group_heads(params, config, groupings, k, v)


def _member(groupings: list[Grouping], leaf: str) -> Float[Array, "L K K"]:
    """1 if heads i and j of a layer are in the same group."""
    groups = np.asarray([getattr(grouping, leaf) for grouping in groupings])
    return jnp.asarray(groups[:, :, None] == groups[:, None], jnp.float32)


def _spread(fusion: Fusion, member: Fusion) -> Float[Array, ""]:
    """Compute the mean over heads of the squared distance of a row from its group's mean."""
    inside = fusion * member
    apart = inside - jnp.matmul(member / member.sum(-1, keepdims=True), inside)
    return jnp.square(apart).sum(-1).mean()


def _weights(fusion: Fusion, member: Fusion) -> Float[Array, "L K"]:
    """Compute the weight of every head in its group: the mean of the rows of the group."""
    return (fusion * member).sum(1) / member.sum(1)


def _rising(x: Array) -> Array:
    """X with a negated gradient: gradient descent on everything else ascends here."""
    return 2 * jax.lax.stop_gradient(x) - x


def _fused(params: Params, config: Config, fusion: dict[str, Fusion]) -> Params:
    """Build the model whose head projections are these weighted sums, biases included."""
    layers = []
    for i, p in enumerate(regroup(params, plan(config, stacked=False))["layers"]):
        new = dict(p)
        for leaf, w in fusion.items():
            for name in (leaf, f"{leaf}_bias"):
                if name in p:
                    heads = p[name].reshape(*p[name].shape[:-1], config.kv_heads, config.head_dim)
                    made = jnp.einsum("ij,...jh->...ih", w[i].astype(heads.dtype), heads)
                    new[name] = made.reshape(p[name].shape)
        layers.append(new)
    return regroup({**params, "layers": tuple(layers)}, plan(config))
