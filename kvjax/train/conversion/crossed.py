"""Adds cross-attention after each attention of a trained decoder, as CEPE does."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP, mlp_of
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.params import init, layer_shapes, plan, regroup


def cross_after_each(params: Params, config: Config, width: int, key: Array) -> tuple[Params, Config]:
    """Cross-attention between the attention and the feed-forward of every layer: CEPE (arXiv:2402.16617).

    A layer becomes two, (attention, nothing) and (cross-attention, its feed-forward), so the new parameters
    are q, k, v, o and attn_norm of layers 1, 3, 5, ... They attend to the states, `width` channels wide, of
    an encoder that is trained with them while the rest is frozen. Their output maps start at zero, so the
    model is initially unchanged. Raises ValueError if a layer is not plain attention.

    >>> import jax
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> made, wider = cross_after_each(init(config, jax.random.key(0)), config, 8, jax.random.key(1))
    >>> [type(mixer).__name__ for mixer in wider.mixers], sorted(made["layers"][0])
    (['Attention', 'CrossAttention'], ['attn_norm', 'k', 'o', 'q', 'v'])
    """
    if any(mixer_of(config, i) != ATTENTION for i in range(config.layers)):
        raise ValueError(
            "cross attention is added after layers of plain attention, and some of this model's are others"
        )
    if width < 1:
        raise ValueError(f"width is {width}, expected the channels of an encoder")
    first = CrossAttention(width=width)
    mixers = (ATTENTION, first, *(ATTENTION, dataclasses.replace(first, source=1)) * (config.layers - 1))
    mlps = [mlp for i in range(config.layers) for mlp in (NoMLP(), mlp_of(config, i))]
    windows = [w for i in range(config.layers) for w in (config.window(i), None)] if config.windows else ()
    inputs = [x for at in config.inputs for x in (None if at is None else 2 * at, None)]
    wider = dataclasses.replace(
        config, layers=2 * config.layers, mixers=mixers, mlps=tuple(mlps), windows=tuple(windows),
        inputs=tuple(inputs),
    )  # fmt: skip
    alone = dataclasses.replace(wider, vocab=1)
    fresh = init(alone, key, params["embed"].dtype, plan(alone, stacked=False))["layers"]
    layers = []
    for i, old in enumerate(regroup(params, plan(config, stacked=False))["layers"]):
        layers.append({name: old[name] for name in layer_shapes(wider, 2 * i)})
        new = fresh[2 * i + 1] | {"o": jnp.zeros_like(fresh[2 * i + 1]["o"])}
        own = CrossAttention.shapes(first, config).keys() | {"attn_norm", "attn_post_norm"}
        layers.append({n: new[n] if n in own else old[n] for n in layer_shapes(wider, 2 * i + 1)})
    return regroup({**params, "layers": tuple(layers)}, plan(wider)), wider
