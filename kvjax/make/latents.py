"""Models whose layers store latents of keys and values, made of the weights of plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.hosts.arrays import fetch
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.params import plan, regroup

# A layer's matrices "q", "k", "v", "o" and biases "v_bias", "o_bias", in float64.
Matrices = dict[str, np.ndarray]


class LatentFactors(NamedTuple):
    """W_k ~ A B and W_v ~ A B: A of all groups side by side ("down"), and B of every group ("up")."""

    key_down: Float[np.ndarray, "D GR"]
    key_up: Float[np.ndarray, "G R e"]
    value_down: Float[np.ndarray, "D GV"]
    value_up: Float[np.ndarray, "G V e"]


# (layer, its mixer, its matrices, channels of a head) -> factors.
Factorise = Callable[[int, GroupedLatent, Matrices, int], LatentFactors]


def only_plain(config: Config, why: str = "low rank is of the projections of plain attention") -> None:
    """Raise ValueError for a model with layers other than plain attention. why: the error's first half."""
    for layer in range(config.layers):
        if (mixer := mixer_of(config, layer)) != ATTENTION:
            raise ValueError(f"{why}, and layer {layer} is {mixer!r}")


def with_latents(params: Params, config: Config, made: Config, factors: Factorise) -> Params:
    """Build the parameters of the model `made`, whose mixers are `GroupedLatent`; unchanged ones stay."""
    old = regroup(params, plan(config, stacked=False))["layers"]
    layers = tuple(_layer(p, made, i, factors) for i, p in enumerate(old))
    return regroup({**params, "layers": layers}, plan(made))


def _layer(p: Params, config: Config, layer: int, factors: Factorise) -> Params:
    """Build the parameters of one layer, [1, ...] as in `p`."""
    mixer = config.mixers[layer]
    assert isinstance(mixer, GroupedLatent)
    w = matrices(p)
    found = factors(layer, mixer, w, config.head_dim)
    v_up = found.value_up
    # Query heads by group, KV head of the group and query head of that KV head.
    sizes = (len(v_up), mixer.group, config.heads // config.kv_heads, config.head_dim, config.d_model)
    out = w["o"].reshape(sizes)
    up = v_up.reshape(*v_up.shape[:2], mixer.group, config.head_dim)
    new = {"k_down": found.key_down, "k_up": found.key_up, "v_down": found.value_down}
    new["o"] = np.einsum("grjh,gjqhd->gjqrd", up, out).reshape(-1, config.d_model)
    if "v_bias" in w:
        # Attention weights sum to one, so every head outputs its values' bias unchanged.
        bias = np.einsum("gjh,gjqhd->d", w["v_bias"].reshape(*sizes[:2], config.head_dim), out)
        new["o_bias"] = bias + w.get("o_bias", 0.0)
    kept = {n: x for n, x in p.items() if n not in ("k", "v", "v_bias", *new)}
    return kept | {n: jnp.asarray(x[None], p["o"].dtype) for n, x in new.items()}


def matrices(p: Params) -> Matrices:
    """Compute the matrices of a layer, from its parameters [1, ...]."""
    return {n: _wide(p[n]) for n in ("q", "k", "v", "o", "v_bias", "o_bias") if n in p}


def _wide(x: Array) -> Any:
    """One layer's array on the host, in float64."""
    return np.asarray(fetch(x[0].astype(jnp.float32)), np.float64)
