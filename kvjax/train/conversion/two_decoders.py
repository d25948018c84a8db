"""Converts a trained decoder to a Block Transformer: its layers become those of the two decoders."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.block_transformer import BlockConfig, plan
from kvjax.models.block_transformer import regroup as regroup_both
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import plan as plan_one
from kvjax.models.params import regroup


def to_blocks(
    params: Params, config: Config, length: int, prefix: int = 2, lower: int | None = None
) -> tuple[Params, BlockConfig]:
    """Let `lower` layers (None: half) process blocks of `length` tokens, the others the tokens of a block.

    The Block Transformer (Ho et al., 2024, arXiv:2406.02657) is uptrained from a decoder whose lower layers
    become the block decoder and whose upper layers become the token decoder. The new parts are initialised as
    follows: the narrow embedding of a token consists of the principal components of the old one, and the
    block decoder's output is used, unchanged, for each of the `prefix` inputs, which the upper layers process
    as they did before. The first prefix is the mean embedding. None of this is exact: train further.

    Raises ValueError if layers of one half use slots of the other half, and if the sizes do not fit.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=4, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> made, two = to_blocks(init(config, jax.random.key(0)), config, 4)
    >>> two.blocks.layers, two.tokens.layers, made["embed"].shape
    (2, 2, (32, 4))
    """
    if config.layers < 2:
        raise ValueError("a model of one layer has no layers for two decoders")
    lower = config.layers // 2 if lower is None else lower
    if not 1 <= lower < config.layers:
        raise ValueError(f"layers is {lower}, expected 1 to {config.layers - 1} that read blocks")
    if any(at is not None for at in config.inputs) or any(
        mixer_of(config, i).takes for i in range(config.layers)
    ):
        raise ValueError("its layers exchange slots or states, which those of two decoders cannot")
    if length < 1 or config.d_model % length:
        raise ValueError(f"length is {length}, expected a divisor of the {config.d_model} channels")
    below = dataclasses.replace(
        _part(config, 0, lower), vocab=prefix * config.d_model, tied=False, embed_scale=1.0
    )
    two = BlockConfig(below, _part(config, lower, config.layers), length, prefix)
    layers = regroup(params, plan_one(config, stacked=False))["layers"]
    embed = params["embed"] * jnp.asarray(config.embed_scale, params["embed"].dtype)
    same = jnp.eye(config.d_model, dtype=embed.dtype)
    blocks = {"norm": jnp.ones_like(params["norm"]) - config.norm_offset, "layers": layers[:lower]}
    both = {
        "embed": components(embed, config.d_model // length),
        "start": jnp.tile(embed.mean(0)[None], (prefix, 1)),
        "blocks": blocks | {"unembed": jnp.tile(same, (1, prefix))},
        "tokens": {**params, "layers": layers[lower:]},
    }
    return regroup_both(both, plan(two)), two


def components(table: Float[Array, "V D"], count: int) -> Float[Array, "V C"]:
    """Project the rows of a table onto its `count` strongest directions, as long on average as they were.

    >>> table = jnp.asarray([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    >>> abs(components(table, 1)).round(2).tolist()
    [[0.0], [5.0]]
    """
    wide = table.astype(jnp.float32)
    left, sizes, _ = jnp.linalg.svd(wide, full_matrices=False)
    kept = left[:, :count] * sizes[None, :count]
    kept = jnp.pad(kept, ((0, 0), (0, count - kept.shape[1])))
    return (kept * jnp.linalg.norm(wide) / jnp.linalg.norm(kept)).astype(table.dtype)


def _part(config: Config, first: int, stop: int) -> Config:
    """Make a decoder of some of the layers."""
    own = {
        name: tuple(given[first:stop])
        for name in ("windows", "mixers", "mlps")
        if (given := getattr(config, name))
    }
    return dataclasses.replace(config, layers=stop - first, inputs=(), **own)
