"""Converts layers to keys and values of low rank, whose cache holds latents of groups of heads.

By texts (Palu), by layers' condition numbers (LoRC), or by nested training (MatryoshkaKV); all make
`GroupedLatent` layers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.params import plan, regroup
from kvjax.ops.base.solve import one_by_one
from kvjax.train.conversion.by_predictions import TokenRows, learn
from kvjax.train.conversion.latents import Moments

# The columns of a layer's key, or value, heads: the basis [L, K, H, H] of every head.
Bases = Float[np.ndarray, "L K H H"]


def columns(params: Params, config: Config, moments: Moments | None) -> dict[str, np.ndarray]:
    """Second moments [L, E, E] of keys and of values, W' C W; C is the identity without moments of inputs."""
    found: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
    for i, p in enumerate(regroup(params, plan(config, stacked=False))["layers"]):
        for name, leaf in (("keys", "k"), ("values", "v")):
            w = np.asarray(p[leaf][0].astype(jnp.float32), np.float64)
            found[name].append(w.T @ (w if moments is None else moments[i] @ w))
    return {name: np.stack(x) for name, x in found.items()}


def fitted_word(rank: float | int, heads: int, arrays: dict[str, np.ndarray]) -> GroupedLowRank:
    """`GroupedLowRank`, with these second moments as its fitted arrays."""
    return GroupedLowRank(rank, heads, fitted=Fitted(arrays, GroupedLowRank.__name__, ""))


@dataclasses.dataclass(frozen=True)
class Progressive(GroupedLowRank):
    """LoRC (arXiv:2410.03111): ranks that fall from layer to layer, by cumulative condition numbers.

    With k_l = prod_(j >= l) cond(W_k^j) cond(W_v^j), layer l keeps

        most (1 - (max log k - log k_l) / (max log k - min log k) (1 - least / most))

    of its channels of keys, and of values: errors in a low layer are amplified by all layers above.

    Differences: a singular value below 1e-6 of the largest counts as that; keys are computed from their
    latents before rotation, while the paper folds the second factor of W_k into W_q. The paper's text was not
    at hand, and the formula is from memory.
    """

    least: float = 0.25
    conditions: tuple[float, ...] = ()

    def _ranks(self, config: Config, group: int) -> list[tuple[int, int]]:
        whole = np.cumsum(np.log(self.conditions)[::-1])[::-1]
        fallen = (whole.max() - whole) / max(whole.max() - whole.min(), 1e-12)
        shares = self.rank * (1 - fallen * (1 - self.least / self.rank))
        ranks = np.maximum(1, np.rint(shares * group * config.head_dim)).astype(int).tolist()
        return [(rank, rank) for rank in ranks]


def conditions(params: Params, config: Config) -> tuple[float, ...]:
    """cond(W_k) cond(W_v) of every layer."""
    found = []
    for p in regroup(params, plan(config, stacked=False))["layers"]:
        sizes = [np.linalg.svd(np.asarray(p[n][0].astype(jnp.float32), np.float64))[1] for n in "kv"]
        found.append(float(np.prod([s[0] / max(s[-1], 1e-6 * s[0], 1e-300) for s in sizes])))
    return tuple(found)


def to_progressive(
    params: Params, config: Config, most: float, least: float, moments: Moments | None
) -> tuple[Params, Config]:
    """Latents of all heads, `most` to `least` of their channels (`Progressive`).

    Raises ValueError for invalid shares, and for layers that are not plain attention.
    """
    if not 0 < least <= most <= 1:
        raise ValueError(f"most={most} and least={least} are no shares with least <= most, of at most 1")
    word = fitted_word(float(most), config.kv_heads, columns(params, config, moments))
    word.config(config)
    falling = Progressive(
        word.rank, word.heads, fitted=word.fitted, least=least, conditions=conditions(params, config)
    )
    return falling.params(params, config), falling.config(config)


def to_nested(
    params: Params, config: Config, rank: int, texts: TokenRows, steps: int, moments: Moments | None
) -> tuple[Params, Config]:
    """MatryoshkaKV (arXiv:2410.14731): every head's keys and values in an orthogonal basis, nested by rank.

    Bases U start at the principal ones of the texts and are trained as U Q(S), Q the Cayley transform (I -
    S)(I + S)^-1 of a skew S, on the original's predictions; each step truncates all heads at a random rank,
    so that the first columns become the most important. Then `rank` columns of every head are kept; any other
    number would work, too. Keeping all of them is lossless.

    Differences: keys are projected before rotation, so that their latents can be stored; one rank is drawn
    for the whole model, and one is kept, while the paper searches ranks per head, greedily. The paper's text
    was not at hand: this follows its summary.

    Raises ValueError for ranks of no channels, where there are no texts, and for layers that are not plain
    attention.
    """
    h, k = config.head_dim, config.kv_heads
    if not 1 <= rank <= h:
        raise ValueError(f"rank is {rank}, expected 1 to {h}, the channels of a head")
    found = columns(params, config, moments)
    fitted_word(rank, 1, found).config(config)
    start = {name: jnp.asarray(_principal(x, k, h), jnp.float32) for name, x in found.items()}

    def build(skew: dict[str, Array], key: Array) -> Params:
        kept = jnp.arange(h, dtype=jnp.int32) < jax.random.randint(key, (), 1, h + 1, jnp.int32)
        bases = {n: jnp.where(kept[None, None, None], rotated(x, skew[n]), 0.0) for n, x in start.items()}
        return projected(params, config, bases)

    none = {name: jnp.zeros_like(x) for name, x in start.items()}
    learnt = learn(none, build, config, (params, config), texts, steps, rate=3e-3)
    bases = {name: np.asarray(rotated(start[name], learnt[name]), np.float64) for name in start}
    word = fitted_word(rank, 1, {name: _in_order(x) for name, x in bases.items()})
    return word.params(params, config), word.config(config)


def rotated(basis: Float[Array, "*a H H"], skew: Float[Array, "*a H H"]) -> Float[Array, "*a H H"]:
    """U (I - S)(I + S)^-1 with S = (skew - skew') / 2: orthogonal where U is, whatever skew is."""
    s = (skew - jnp.swapaxes(skew, -1, -2)) / 2
    eye = jnp.broadcast_to(jnp.eye(s.shape[-1], dtype=s.dtype), s.shape)
    # (I - S) and (I + S)^-1 commute.
    return jnp.matmul(basis, one_by_one(jnp.linalg.solve, eye + s, eye - s))


def projected(params: Params, config: Config, bases: dict[str, Float[Array, "L K H R"]]) -> Params:
    """Build the model whose keys and values are W U U' of every head; components outside U are lost."""
    layers = []
    for i, p in enumerate(regroup(params, plan(config, stacked=False))["layers"]):
        new = dict(p)
        for name, leaf in (("keys", "k"), ("values", "v")):
            heads = p[leaf].reshape(*p[leaf].shape[:-1], config.kv_heads, config.head_dim)
            u = bases[name][i].astype(heads.dtype)
            new[leaf] = jnp.einsum("ldkh,khr,kgr->ldkg", heads, u, u).reshape(p[leaf].shape)
        layers.append(new)
    return regroup({**params, "layers": tuple(layers)}, plan(config))


def _principal(moments: Float[np.ndarray, "L E E"], heads: int, h: int) -> Bases:
    """Compute the principal axes of every head's own channels, largest first."""
    own = moments.reshape(len(moments), heads, h, heads, h)
    blocks = np.stack([own[:, k, :, k] for k in range(heads)], 1)
    return np.linalg.eigh(blocks)[1][..., ::-1]


def _in_order(bases: Bases) -> Float[np.ndarray, "L E E"]:
    """Moments whose principal axes, head by head, are these columns in this order."""
    layers, heads, h = bases.shape[:3]
    found = np.zeros((layers, heads, h, heads, h))
    blocks = np.einsum("lkhr,r,lkgr->lkhg", bases, np.arange(h, 0, -1.0), bases)
    for k in range(heads):
        found[:, k, :, k] = blocks[:, k]
    return found.reshape(layers, heads * h, heads * h)
