"""Converts plain attention to native sparse attention, and fits its selection to the old attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.kept_tokens import rotated
from kvjax.models.mixers.native_sparse import NativeSparse
from kvjax.models.params import init, plan, regroup
from kvjax.ops.attention.native_sparse import coarse_attention
from kvjax.ops.attention.token_cache import Places, products
from kvjax.ops.base.softmax import softmax
from kvjax.train.conversion.by_predictions import padded
from kvjax.train.conversion.linear import seen_by

# Logits of the gates of compressed blocks, selected blocks and the window in a converted layer: nearly all of
# its output is attention to the selected blocks, which is the old one where these are all.
GATES = (-4.0, 4.0, -4.0)
# Of the fit of phi: texts per step, and the largest learning rate.
ROWS, RATE = 2, 3e-3
# The parameters that decide what is selected.
SELECTS = ("phi_k_place", "phi_k_in", "phi_k_out")


def to_native_sparse(
    params: Params, config: Config, word: dict[str, Any], texts: Sequence[Sequence[int]], steps: int
) -> tuple[Params, Config]:
    """Replace all layers of plain attention by `NativeSparse`, whose phi is at first the mean of a block.

    word: fields of `NativeSparse` beside the heads. steps: how many steps fit the phi of keys by `divergence`
    on texts, in every layer by itself on the original's inputs. Raises ValueError for a model with other
    layers, or without texts to fit to.
    """
    _check(config)
    heads = dict(
        heads=config.heads, key_dim=config.head_dim, value_dim=config.head_dim, groups=config.kv_heads
    )
    mixer = NativeSparse(**heads, **word)
    made = dataclasses.replace(config, mixers=(mixer,) * config.layers)
    alone = dataclasses.replace(made, layers=1, mixers=(mixer,), mlps=(NoMLP(),), inputs=(), vocab=1)
    old = regroup(params, plan(config, stacked=False))["layers"]
    layers = []
    for i, p in enumerate(old):
        new = init(alone, jax.random.key(i), p["o"].dtype, plan(alone, stacked=False))["layers"][0]
        new = {n: new[n] for n in mixer.shapes(alone) if n not in p}
        new |= {n: jnp.zeros_like(new[n]) for n in ("branch_gate", "phi_k_out", "phi_v_out")}
        new["branch_gate_bias"] = jnp.tile(jnp.asarray(GATES, p["o"].dtype), (1, config.heads))
        layers.append(p | new)
    if steps:
        if not texts:
            raise ValueError("what it selects is fitted to texts: give some, or steps=0")
        tokens, lengths = padded(texts)
        seen = seen_by({**params, "layers": tuple(old)}, tokens, lengths, config)
        layers = [_fitted(p, x, lengths, alone, steps) for p, x in zip(layers, seen.inputs, strict=True)]
    return regroup({**params, "layers": tuple(layers)}, plan(made)), made


def _check(config: Config) -> None:
    if any(mixer_of(config, i) != ATTENTION for i in range(config.layers)):
        raise ValueError("it is defined for models whose layers are all plain attention")
    given = [
        n for n in ("qkv_bias", "qk_norm", "o_bias", "query_scale", "attention_softcap") if getattr(config, n)
    ]
    given += ["windows"] if any(config.window(i) is not None for i in range(config.layers)) else []
    given += ["norms='post'"] if config.norms == "post" else []
    given += [f"a rope of kind {config.rope.kind!r}"] if config.rope.by_length else []
    if given:
        raise ValueError(f"NativeSparse has no {given[0]}, and the model has")


def divergence(
    p: Params, x: Float[Array, "B T D"], lengths: Int[Array, "B"], config: Config
) -> Float[Array, ""]:
    """Compute mean KL(attention || importance) over blocks a query may select, for one `NativeSparse` layer.

    attention: the mass of dense attention in every block, summed over the query heads of a KV head (the
    indexer's loss of DSA, arXiv:2512.02556, over blocks); importance: that of `NativeSparse`. Both are
    divided by their sums over the blocks that are not read anyway. x: the layer's input; p: its parameters,
    not stacked.
    """
    (word,) = config.mixers
    assert isinstance(word, NativeSparse)
    target, importance, open_blocks = _masses(p, x, lengths, config, word)
    kl = jnp.where(open_blocks, target * (_log(target) - _log(importance)), 0.0).sum(-1)
    counted = open_blocks.any(-1)
    return jnp.where(counted, kl, 0.0).sum() / jnp.maximum(counted.sum(), 1).astype(kl.dtype)


def _log(x: Array) -> Array:
    return jnp.log(jnp.maximum(x, 1e-9))


def _masses(
    p: Params, x: Float[Array, "B T D"], lengths: Int[Array, "B"], config: Config, word: NativeSparse
) -> tuple[Float[Array, "B H T J"], Float[Array, "B H T J"], Bool[Array, "B H T J"]]:
    """Compute shares of attention and importance of J blocks, and which blocks a query may select."""
    b, t, _ = x.shape
    x = stream_norm(x, p, "attn_norm", config)
    pos = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    q, k, _ = word.projected(p, x)
    q, k = (jax.lax.stop_gradient(rotated(config, y, pos)) for y in (q, k))
    scale, count = q.shape[-1] ** -0.5, -(-t // word.block)
    dense, _ = softmax(products(q, k) * scale, jnp.tril(jnp.ones((t, t), bool))[None, None])
    dense = jnp.pad(dense, ((0, 0), (0, 0), (0, 0), (0, count * word.block - t)))
    mass = dense.reshape(b, word.key_heads, -1, t, count, word.block).sum((2, 5))
    coarse = word.phi(p, "k", k)
    at = Places(pos, jnp.zeros_like(pos), pos >= 0)
    _, weights = coarse_attention(q, at, (coarse, coarse), scale, word.sizes)
    importance = weights @ jnp.asarray(word.sizes.overlap(t), weights.dtype)
    block, own = np.arange(count), np.arange(t)[:, None] // word.block
    free = jnp.asarray((block >= word.initial) & (block <= own - word.local))[None, None]
    free = free & (pos < lengths[:, None])[:, None, :, None]
    free = jnp.broadcast_to(free, mass.shape)
    return _share(mass, free), _share(importance, free), free


def _share(x: Array, among: Array) -> Array:
    x = jnp.where(among, x, 0.0)
    return x / jnp.maximum(x.sum(-1, keepdims=True), 1e-9)


@partial(jax.jit, static_argnames=("config", "steps"))
def _fitted(
    p: Params, inputs: Float[Array, "B T D"], lengths: Int[Array, "B"], config: Config, steps: int
) -> Params:
    """Fit a layer's phi of keys by Adam on `divergence`."""
    flat = {n: w[0].astype(jnp.float32) for n, w in p.items()}
    rule = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def loss(own: Params, at: Int[Array, "R"]) -> Float[Array, ""]:
        return divergence(flat | own, inputs[at].astype(jnp.float32), lengths[at], config)

    def step(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        own, state = carry
        at = (number * ROWS + jnp.arange(ROWS, dtype=jnp.int32)) % len(inputs)
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(jax.grad(loss)(own, at), state, own)
        return (jax.tree.map(jnp.add, own, change), state), None

    own = {n: flat[n] for n in SELECTS}
    own, _ = jax.lax.scan(step, (own, rule.init(own)), jnp.arange(steps, dtype=jnp.int32))[0]
    return p | {n: w[None].astype(p[n].dtype) for n, w in own.items()}
