"""Converts attention to linear attention layer by layer: each is distilled from the attention it replaces.

The layers are trained independently, all on the inputs of the original's layers (as in the first stage of
LoLCATs, arXiv:2410.10254, and the distillation of hybrids, arXiv:2408.15237), so errors of lower layers do
not affect the targets. The loss of the whole model is then measured by its predictions.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.layers import Params
from kvjax.models.mixer import LayerValues, Mixer
from kvjax.models.mixers.attention import ATTENTION, mixer_of
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, KimiDelta, Retention
from kvjax.models.params import init, plan, regroup
from kvjax.models.transformer import run_layers, unembed
from kvjax.train.conversion.by_predictions import padded

WORDS: dict[str, Callable[[int, int, int], Mixer]] = {
    word.__name__: word for word in (GatedDelta, KimiDelta, Mamba2, GatedLinear, Retention)
}
# Texts per training step of a layer, and its largest learning rate.
ROWS, RATE = 2, 3e-3


class OriginalOutputs(NamedTuple):
    """The original's layer inputs, its mixers' outputs, its logits, and the lengths of the texts."""

    inputs: Float[Array, "L B T D"]
    added: Float[Array, "L B T D"]
    logits: Float[Array, "B T V"]
    lengths: Int[Array, "B"]


def to_linear(
    params: Params,
    config: Config,
    texts: Sequence[Sequence[int]],
    *,
    layers: Sequence[int] | None = None,
    keep: int | None = None,
    mixer: str = "GatedDelta",
    steps: int = 200,
) -> tuple[Params, Config]:
    """Build a hybrid: some layers of plain attention become linear attentions of as many heads and channels.

    layers: which to convert; or keep: how many to keep, namely those whose replacement alone changes the
    predictions most (the mean KL divergence over the texts). mixer: the name of the new mixer. A layer starts
    from the projections of the attention that it replaces. Raises ValueError if there are no texts to train
    on, and for layers that are not plain attention.
    """
    replaced = _checked(config, texts, layers, keep, mixer)
    word = WORDS[mixer](config.heads, config.head_dim, config.head_dim)
    params = regroup(params, plan(config, stacked=False))
    tokens, lengths = padded(texts)
    seen = seen_by(params, tokens, lengths, config)
    made = {i: _trained(params["layers"][i], config, word, i, seen, steps) for i in replaced}
    if keep is not None:
        damage = {}
        for i in replaced:
            one = _replaced(params, config, word, {i: made[i]})
            damage[i] = float(_divergence(one[0], tokens, seen, one[1]))
        stay = sorted(damage, key=damage.__getitem__)[len(replaced) - keep :]
        made = {i: p for i, p in made.items() if i not in stay}
    new, hybrid = _replaced(params, config, word, made)
    return regroup(new, plan(hybrid)), hybrid


def attention_changes(
    params: Params, config: Config, texts: Sequence[Sequence[int]]
) -> Float[np.ndarray, "L"]:
    """1 - cos(x, x + attention(x)), the mean over the tokens of some texts, for every layer.

    The criterion by which layers lose their attention (What Matters in Transformers?, arXiv:2406.15786,
    section 3).
    """
    params = regroup(params, plan(config, stacked=False))
    seen = seen_by(params, *padded(texts), config)
    x, y = seen.inputs.astype(jnp.float32), (seen.inputs + seen.added).astype(jnp.float32)
    size = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    apart = 1 - (x * y).sum(-1) / jnp.maximum(size, 1e-20)
    real = jnp.arange(x.shape[2], dtype=jnp.int32)[None] < seen.lengths[:, None]
    return np.asarray(jnp.where(real[None], apart, 0.0).sum((1, 2)) / sum(map(len, texts)))


def _checked(
    config: Config, texts: Sequence[Sequence[int]], layers: Sequence[int] | None, keep: int | None, mixer: str
) -> list[int]:
    """Choose the layers to convert."""
    if mixer not in WORDS:
        near = difflib.get_close_matches(mixer, WORDS, 1, 0.3)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ValueError(f"mixer is {mixer!r}, expected one of {', '.join(WORDS)}{hint}")
    plain = [i for i in range(config.layers) if mixer_of(config, i) == ATTENTION]
    if (layers is None) == (keep is None):
        raise ValueError("give either the layers that become linear or how many keep their attention (keep)")
    if strange := [i for i in layers or () if i not in plain]:
        raise ValueError(f"layers {strange} are none of plain attention: those are {plain}")
    if keep is not None and not 0 <= keep < len(plain):
        raise ValueError(
            f"keep is {keep}, expected 0 to {len(plain) - 1} of {len(plain)} layers of attention"
        )
    if not texts:
        raise ValueError("its layers learn from texts: give some")
    return plain if layers is None else sorted(set(layers))


def _replaced(params: Params, config: Config, word: Mixer, made: dict[int, Params]) -> tuple[Params, Config]:
    mixers = tuple(word if i in made else mixer_of(config, i) for i in range(config.layers))
    windows = tuple(None if i in made else config.window(i) for i in range(config.layers))
    hybrid = dataclasses.replace(config, mixers=mixers, windows=windows if config.windows else ())
    layers = tuple(made.get(i, p) for i, p in enumerate(params["layers"]))
    return {**params, "layers": layers}, hybrid


@partial(jax.jit, static_argnames="config")
def seen_by(
    params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], config: Config
) -> OriginalOutputs:
    """Record the input of every layer of a model, and what its mixer adds, over some texts."""

    def look(passed: LayerValues) -> tuple[Array, Array]:
        return jnp.zeros_like(passed.out) if passed.mixed is None else passed.mixed, passed.out

    ran = run_layers(params, tokens, config, lengths, look=look)
    scale = jnp.asarray(config.embed_scale, params["embed"].dtype)
    outs = [out[0] for _, out in ran.collected]
    inputs = jnp.stack([params["embed"][tokens] * scale, *outs[:-1]])
    return OriginalOutputs(
        inputs, jnp.stack([x[0] for x, _ in ran.collected]), unembed(params, ran.x, config), lengths
    )


@partial(jax.jit, static_argnames="config")
def _divergence(
    params: Params, tokens: Int[Array, "B T"], seen: OriginalOutputs, config: Config
) -> Float[Array, ""]:
    """Compute the mean over real tokens of KL(original || this model)."""
    ran = run_layers(params, tokens, config, seen.lengths)
    mine, theirs = (
        jax.nn.log_softmax(x.astype(jnp.float32)) for x in (unembed(params, ran.x, config), seen.logits)
    )
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < seen.lengths[:, None]
    return jnp.where(real, (jnp.exp(theirs) * (theirs - mine)).sum(-1), 0.0).sum() / real.sum().astype(
        jnp.float32
    )


def _trained(p: Params, config: Config, word: Mixer, layer: int, seen: OriginalOutputs, steps: int) -> Params:
    """Train the layer that replaces attention; its feed-forward is unchanged."""
    alone = dataclasses.replace(
        config, layers=1, mixers=(word,), mlps=(NoMLP(),), windows=(), inputs=(), vocab=1
    )
    start = started(p, alone, layer)
    own = {name: w.astype(jnp.float32) for name, w in start.items()}
    learnt = learn_layer(own, seen.inputs[layer], seen.added[layer], seen.lengths, alone, steps)
    gone = set(ATTENTION.shapes(config)) - set(learnt)
    kept = {name: w for name, w in p.items() if name not in gone}
    return kept | {name: w.astype(p["o"].dtype) for name, w in learnt.items()}


def started(p: Params, alone: Config, seed: int) -> Params:
    """Start a layer of linear attention from one of plain attention: its projections, all else at random.

    KV heads are repeated for their query heads, and short convolutions start as the identity.
    """
    word, h = alone.mixers[0], alone.head_dim
    new = dict(init(alone, jax.random.key(seed), p["o"].dtype, plan(alone, stacked=False))["layers"][0])
    each = alone.heads // alone.kv_heads

    def repeated(w: Float[Array, "1 D E"]) -> Array:
        return jnp.repeat(w.reshape(*w.shape[:2], -1, h), each, 2).reshape(*w.shape[:2], -1)

    q, k, v = p["q"], repeated(p["k"]), repeated(p["v"])
    if isinstance(word, Mamba2):
        new |= {"xbc": jnp.concatenate([v, k, q], -1)}
    else:
        new |= {"q": q, "k": k, "v": v}
    if "conv" in new:
        new["conv"] = jnp.zeros_like(new["conv"]).at[:, -1].set(1)
    return new | {name: p[name] for name in ("o", "attn_norm", "attn_post_norm") if name in new and name in p}


def around(alone: Config) -> Params:
    """Make the parameters outside the layers, for a single layer whose inputs are vectors."""
    return {"embed": jnp.zeros((1, alone.d_model)), "norm": jnp.ones((alone.d_model,))}


@partial(jax.jit, static_argnames=("alone", "steps"))
def learn_layer(
    p: Params,
    inputs: Float[Array, "B T D"],
    added: Float[Array, "B T D"],
    lengths: Int[Array, "B"],
    alone: Config,
    steps: int,
) -> Params:
    """Train a layer by Adam on the relative squared distance from the original's mixer outputs."""
    rule = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    real = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    size = jnp.where(real[..., None], jnp.square(added.astype(jnp.float32)), 0.0).sum()
    size = jnp.maximum(size, 1e-20)

    def loss(p: Params, at: Int[Array, "R"]) -> Float[Array, ""]:
        x = inputs[at].astype(jnp.float32)
        ran = run_layers(
            {**around(alone), "layers": (p,)}, x, alone, lengths[at], look=lambda passed: passed.mixed
        )
        apart = ran.collected[0][0] - added[at].astype(jnp.float32)
        return jnp.where(real[at][..., None], jnp.square(apart), 0.0).sum() / size

    def step(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        p, state = carry
        at = (number * ROWS + jnp.arange(ROWS, dtype=jnp.int32)) % len(inputs)
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(jax.grad(loss)(p, at), state, p)
        return (jax.tree.map(jnp.add, p, change), state), None

    return jax.lax.scan(step, (p, rule.init(p)), jnp.arange(steps, dtype=jnp.int32))[0][0]
