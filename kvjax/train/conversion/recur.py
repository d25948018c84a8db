"""RecurFormer: heads that attend mostly to nearby tokens become Mamba-2 heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.feed_forward import GATED_MLP, NoMLP
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixers.attention import ATTENTION, Attention, mixer_of
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.params import plan, regroup
from kvjax.models.transformer import run_layers
from kvjax.ops.base.rope import angles, rotate
from kvjax.train.conversion.by_predictions import TokenRows, padded
from kvjax.train.conversion.linear import around, learn_layer, seen_by, started


def to_recurrent_heads(
    params: Params, config: Config, texts: TokenRows, kv_heads: int, near: int, steps: int
) -> tuple[Params, Config]:
    """RecurFormer (arXiv:2410.12850): keeps `kv_heads` KV heads per layer; the others become Mamba-2.

    The replaced heads are those whose query heads give the largest share of their attention to the `near`
    newest tokens (`recency`). A layer becomes two of the skeleton, side by side: attention of the remaining
    heads, and a Mamba-2 with as many heads as query heads were replaced, which is trained for `steps` to
    produce these heads' outputs from their inputs. Differences: whole KV heads are replaced, together with
    their slots; the paper has Mamba blocks and a threshold of the ratio, and then trains the whole model
    further.

    Raises ValueError for layers that are not plain attention, norms that are not before it, numbers of heads
    that leave nothing to change, and where there are no texts longer than `near`.

    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=2, head_dim=4, d_ff=32)
    >>> made, mixed = to_recurrent_heads(init(config, jax.random.key(0)), config, [[1, 2, 3]], 1, 2, steps=1)
    >>> [type(mixer).__name__ for mixer in mixed.mixers], mixed.mixers[0].kv_heads
    (['Attention', 'Mamba2'], 1)
    """
    _check(config, texts, kv_heads, near)
    each = config.heads // config.kv_heads
    few = Attention(heads=kv_heads * each, kv_heads=kv_heads)
    word = Mamba2((config.kv_heads - kv_heads) * each, config.head_dim, config.head_dim)
    params = regroup(params, plan(config, stacked=False))
    tokens, lengths = padded(texts)
    seen = seen_by(params, tokens, lengths, config)
    layers = []
    for i, p in enumerate(params["layers"]):
        order = np.argsort(recency(p, seen.inputs[i], lengths, config, i, near), kind="stable")
        stay, leave = (sorted(part.tolist()) for part in (order[:kv_heads], order[kv_heads:]))
        own = {name: p[name] for name in ("attn_norm", *ATTENTION.shapes(config))}
        layers.append(of_heads(own, stay, config))
        # The bias of the output map stays with the attention.
        old = {name: w for name, w in of_heads(own, leave, config).items() if name != "o_bias"}
        learnt = _learnt(old, _alone(config, word, i, len(leave)), seen.inputs[i], lengths, i, steps)
        rest = {name: w for name, w in p.items() if name not in own}
        layers.append(rest | {name: w.astype(p["o"].dtype) for name, w in learnt.items()})
    mixed = _side_by_side(config, few, word)
    return regroup({**params, "layers": tuple(layers)}, plan(mixed)), mixed


def _side_by_side(config: Config, few: Attention, word: Mamba2) -> Config:
    """Two layers for one: attention without a feed-forward, and heads beside it that take the same input."""
    mlps = config.mlps or (GATED_MLP,) * config.layers
    return dataclasses.replace(
        config,
        layers=2 * config.layers,
        mixers=(few, word) * config.layers,
        mlps=tuple(x for mlp in mlps for x in (NoMLP(), mlp)),
        inputs=tuple(x for i in range(config.layers) for x in (None, 2 * i)),
        windows=tuple(x for window in config.windows for x in (window, None)),
    )


def _check(config: Config, texts: TokenRows, kv_heads: int, near: int) -> None:
    if any(mixer_of(config, i) != ATTENTION for i in range(config.layers)) or config.inputs:
        raise ValueError("heads become recurrent in models whose layers are all plain attention")
    if config.norms != "pre" or config.qk_norm == "full":
        raise ValueError(
            "heads become recurrent where norms stand before the mixer and heads are normed apart, got "
            f"norms={config.norms!r} and qk_norm={config.qk_norm!r}"
        )
    if not 1 <= kv_heads < config.kv_heads:
        raise ValueError(f"kv_heads is {kv_heads}, expected 1 to {config.kv_heads - 1} that stay")
    if not texts or max(map(len, texts)) <= near or near < 1:
        raise ValueError(f"the share of the near={near} newest tokens is that of texts: give longer ones")


def recency(
    p: Params,
    inputs: Float[Array, "B T D"],
    lengths: Array,
    config: Config,
    layer: int,
    near: int,
) -> Float[np.ndarray, "K"]:
    """Compute the recency ratio: the share of attention that a KV head's query heads give the newest tokens.

    The mean over queries that see more than `near` tokens, and over the heads; the query's own token counts.
    """
    p = {name: w[0] for name, w in p.items()}
    x = stream_norm(inputs, p, "attn_norm", config)
    made = ATTENTION.project(p, x, config)
    assert made.k is not None
    rope, pos = config.layer_rope(layer), jnp.arange(x.shape[1], dtype=jnp.int32)
    cos, sin = angles(rope, pos[None, None], config.head_dim)
    q, k = (rotate(y.astype(jnp.float32), cos, sin, rope.start) for y in (made.q, made.k))
    q = q.reshape(q.shape[0], config.kv_heads, -1, *q.shape[2:])
    logits = jnp.einsum("bkgth,bksh->bkgts", q, k) * config.scale
    if config.attention_softcap is not None:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    back = pos[:, None] - pos[None]
    seen = (back >= 0) & (back < (config.window(layer) or len(pos)))
    share = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf))
    of_query = jnp.where((back < near)[None, None, None], share, 0.0).sum(-1).mean(2)
    asked = (pos >= near)[None] & (pos[None] < lengths[:, None])
    return np.asarray(jnp.where(asked[:, None], of_query, 0.0).sum((0, 2))) / int(asked.sum())


def of_heads(p: Params, kv_heads: Sequence[int], config: Config) -> Params:
    """Return the attention parameters of some of the KV heads and their query heads."""
    queries = np.arange(config.heads).reshape(config.kv_heads, -1)[list(kv_heads)].ravel()
    found = dict(p)
    for leaf, heads in (("q", queries), ("k", np.asarray(kv_heads)), ("v", np.asarray(kv_heads))):
        for name in (leaf, f"{leaf}_bias"):
            if name in p:
                split = p[name].reshape(*p[name].shape[:-1], -1, config.head_dim)
                found[name] = split[..., heads, :].reshape(*p[name].shape[:-1], -1)
    rows = p["o"].reshape(p["o"].shape[0], -1, config.head_dim, config.d_model)[:, queries]
    return found | {"o": rows.reshape(p["o"].shape[0], -1, config.d_model)}


def _alone(config: Config, word: Mamba2, layer: int, kv_heads: int) -> Config:
    """Return the replaced heads of layer `layer`, as a model of one layer."""
    windows = (config.window(layer),) if config.windows else ()
    return dataclasses.replace(
        config, layers=1, heads=word.heads, kv_heads=kv_heads, mixers=(word,), mlps=(NoMLP(),), vocab=1,
        windows=windows, o_bias=False,
    )  # fmt: skip


def _learnt(
    p: Params, alone: Config, inputs: Float[Array, "B T D"], lengths: Array, layer: int, steps: int
) -> Params:
    """Train a Mamba-2 to produce the outputs of these attention heads."""
    p = {name: w.astype(jnp.float32) for name, w in p.items()}
    heads, inputs = dataclasses.replace(alone, mixers=(ATTENTION,)), inputs.astype(jnp.float32)
    tree = around(alone) | {"layers": (p,)}
    put_out = run_layers(tree, inputs, heads, lengths, look=lambda passed: passed.mixed).collected[0][0]
    alone = dataclasses.replace(alone, windows=())
    return learn_layer(started(p, alone, layer), inputs, put_out, lengths, alone, steps)
