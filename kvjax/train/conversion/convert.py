"""A trained model as the start of another architecture: the first step of uptraining."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.models.config import Config
from kvjax.models.feed_forward import GATED_MLP
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.params import init, plan, regroup
from kvjax.models.stacking import layers_of_groups, with_layers
from kvjax.ops.base.dtypes import wide
from kvjax.state.code_forms import times
from kvjax.store.rotate import Rotate

Weights = Float[Array, "L K"]


def pool_heads(
    params: Params,
    config: Config,
    kv_heads: int,
    k_weights: Weights | None = None,
    v_weights: Weights | None = None,
) -> tuple[Params, Config]:
    """Fewer KV heads, each the mean of a group of neighbours: GQA's conversion (arXiv:2305.13245).

    With weights [layers, KV heads], a new head is their weighted sum instead (WGQA, arXiv:2407.10855): train
    them through this function, starting at 1 / group size; the result decodes as plain GQA, so they cost
    nothing later. Every layer must be plain attention. Raises ValueError if the heads do not divide or the
    weights do not fit.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=4, head_dim=4, d_ff=32)
    >>> pooled, smaller = pool_heads(init(config, jax.random.key(0)), config, 2)
    >>> smaller.kv_heads, pooled["layers"][0]["k"].shape
    (2, (1, 16, 8))
    """
    if kv_heads < 1 or config.kv_heads % kv_heads:
        raise ValueError(f"{config.kv_heads} KV heads cannot become {kv_heads} equal groups")
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("pooling heads is defined for models whose layers are all plain attention")
    _check_weights(config, k_weights=k_weights, v_weights=v_weights)
    group = np.arange(config.kv_heads) // (config.kv_heads // kv_heads)
    layers = []
    for i, p in enumerate(_one_by_one(params, config)["layers"]):
        new = dict(p)
        for leaf, w in (("k", k_weights), ("v", v_weights)):
            new |= _pooled(p, leaf, group, np.arange(kv_heads), None if w is None else w[i])
        layers.append(new)
    smaller = dataclasses.replace(config, kv_heads=kv_heads)
    return regroup({**params, "layers": tuple(layers)}, plan(smaller)), smaller


def _check_weights(config: Config, **weights: Weights | None) -> None:
    for name, w in weights.items():
        if w is not None and w.shape != (config.layers, config.kv_heads):
            raise ValueError(f"{name} has shape {w.shape}, expected [{config.layers}, {config.kv_heads}]")


def _pooled(
    p: Params, leaf: str, group: np.ndarray, kept: np.ndarray, weights: Float[Array, "K"] | None
) -> Params:
    """Pool a projection and bias: new head j is the mean, or weighted sum, of heads i in group kept[j]."""
    member = group[:, None] == kept
    share = jnp.asarray(member / member.sum(0), jnp.float32)
    if weights is not None:
        share = jnp.where(member, weights.astype(jnp.float32)[:, None], 0.0)
    out = {}
    for name in (leaf, f"{leaf}_bias"):
        if name in p:
            w = p[name].astype(wide(p[name]))
            heads = w.reshape(*w.shape[:-1], len(group), -1)
            new = jnp.einsum("...kh,kg->...gh", heads, share.astype(w.dtype), precision="highest")
            out[name] = new.reshape(*w.shape[:-1], -1).astype(p[name].dtype)
    return out


class Grouping(NamedTuple):
    """The groups of one layer: KV head i is pooled into key head k[i] and into value head v[i].

    reads: the new key head, and value head, that each query head uses; None if each follows its own.
    """

    k: tuple[int, ...]
    v: tuple[int, ...]
    reads: tuple[int, ...] | None = None


def group_heads(
    params: Params,
    config: Config,
    groupings: Sequence[Grouping | None],
    k_weights: Weights | None = None,
    v_weights: Weights | None = None,
) -> tuple[Params, Config]:
    """Pool KV heads by any groups, per layer: the start of AsymGQA, QCQA, DHA, key-driven GQA.

    The searches of `kvjax.train.conversion.grouping` find the groups. A layer of None is unchanged; the
    others become `HeadMaps`, each new head the mean of its group or, with weights [layers, KV heads], its
    weighted sum (DHA's linear fusion, arXiv:2406.06567: train them through this function, starting at 1 /
    group size). Heads that no query head uses are removed. Every layer must be plain attention. Raises
    ValueError if a grouping does not cover the heads.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=4, head_dim=4, d_ff=32)
    >>> params = init(config, jax.random.key(0))
    >>> grouped, smaller = group_heads(params, config, [Grouping(k=(0, 0, 0, 1), v=(0, 1, 2, 1))])
    >>> smaller.mixers[0].v_of, grouped["layers"][0]["k"].shape, grouped["layers"][0]["v"].shape
    ((0, 1, 2, 1), (1, 16, 8), (1, 16, 12))
    """
    if len(groupings) != config.layers:
        raise ValueError(f"groupings names {len(groupings)} layers, the model has {config.layers}")
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("grouping heads is defined for models whose layers are all plain attention")
    _check_weights(config, k_weights=k_weights, v_weights=v_weights)
    mixers, layers = [], []
    for i, (grouping, p) in enumerate(zip(groupings, _one_by_one(params, config)["layers"], strict=True)):
        new, mixer = dict(p), Attention()
        if grouping is not None:
            _check_grouping(grouping, config, i)
            maps = []
            for leaf, w in (("k", k_weights), ("v", v_weights)):
                group = np.array(getattr(grouping, leaf))
                own = np.repeat(group, config.heads // config.kv_heads)
                kept, reads = np.unique(
                    own if grouping.reads is None else grouping.reads, return_inverse=True
                )
                new |= _pooled(p, leaf, group, kept, None if w is None else w[i])
                maps.append(tuple(reads.tolist()))
            mixer = HeadMaps(tuple(range(config.heads)), *maps)
        mixers.append(mixer)
        layers.append(new)
    smaller = dataclasses.replace(config, mixers=tuple(mixers))
    return regroup({**params, "layers": tuple(layers)}, plan(smaller)), smaller


def _check_grouping(grouping: Grouping, config: Config, layer: int) -> None:
    for name in "kv":
        group = getattr(grouping, name)
        if len(group) != config.kv_heads or sorted(set(group)) != list(range(max(group, default=0) + 1)):
            raise ValueError(
                f"layer {layer}: {name}={tuple(group)} must name a group for each of the {config.kv_heads} "
                "KV heads, counted from 0 on and none empty"
            )
    reads, heads = grouping.reads, {max(grouping.k) + 1, max(grouping.v) + 1}
    if reads is not None and (
        len(reads) != config.heads or len(heads) > 1 or not set(reads) <= set(grouping.k)
    ):
        raise ValueError(
            f"layer {layer}: reads={tuple(reads)} must name a new head for each of the {config.heads} query "
            f"heads, of as many key as value heads; there are {max(grouping.k) + 1} and {max(grouping.v) + 1}"
        )


def share_layers(params: Params, config: Config, sources: Sequence[int]) -> tuple[Params, Config]:
    """Layers that share another layer's keys and values; sources[i] = i keeps its own (CLA, MLKV).

    A source projects with the mean of its own and its readers' matrices (MLKV, arXiv:2406.09297). Every layer
    must be plain attention. Raises ValueError for sources that do not exist or share others' slots.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> shared, smaller = share_layers(init(config, jax.random.key(0)), config, [0, 0])
    >>> smaller.mixers[1].source, sorted(shared["layers"][1])[:3]
    (0, ['attn_norm', 'down', 'gate'])
    """
    if len(sources) != config.layers:
        raise ValueError(f"sources names {len(sources)} layers, the model has {config.layers}")
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("sharing layers is defined for models whose layers are all plain attention")
    mixers = tuple(Attention(source=None if s == i else s) for i, s in enumerate(sources))
    smaller = dataclasses.replace(config, mixers=mixers)
    old = _one_by_one(params, config)["layers"]
    layers = []
    for i, p in enumerate(old):
        new = {
            n: w for n, w in p.items() if i == sources[i] or n not in ("k", "v", "k_bias", "v_bias", "k_norm")
        }
        readers = [old[j] for j, s in enumerate(sources) if s == i]
        for name in ("k", "v", "k_bias", "v_bias"):
            if name in new:
                new[name] = sum((r[name] for r in readers[1:]), readers[0][name]) / len(readers)
        layers.append(new)
    return regroup({**params, "layers": tuple(layers)}, plan(smaller)), smaller


def rotate_values(params: Params, config: Config, rotation: Rotate) -> Params:
    """Rotate the basis of every head's values and keep the function: W_v R' and R W_o (arXiv:2404.00456).

    QuaRot folds the rotation of values into weights this way. Values of these parameters stored by a codec
    are the values of `params` stored by `rotation >> codec`, and steps need not rotate outputs back. Every
    layer must be plain attention. Raises ValueError for others.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=1, heads=4, kv_heads=2, head_dim=4, d_ff=32)
    >>> params = init(config, jax.random.key(0))
    >>> folded = rotate_values(params, config, Rotate())
    >>> w = (folded["layers"][0]["v"] @ folded["layers"][0]["o"][:, :8])
    >>> bool(jnp.allclose(w, params["layers"][0]["v"] @ params["layers"][0]["o"][:, :8], atol=1e-5))
    True
    """
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("rotating values is defined for models whose layers are all plain attention")
    matrix = rotation.matrix(config.head_dim)

    def rotated(p: Params) -> Params:
        # Rows of heads: the output map's are its inputs.
        rows = {name: p[name] for name in ("v", "v_bias") if name in p}
        rows["o"] = jnp.swapaxes(p["o"], -1, -2)
        new = {}
        for name, w in rows.items():
            heads = w.astype(wide(w)).reshape(*w.shape[:-1], -1, config.head_dim)
            new[name] = times(heads, matrix.T).reshape(w.shape).astype(w.dtype)
        return {**p, **new, "o": jnp.swapaxes(new["o"], -1, -2)}

    return with_layers(params, [rotated(p) for p in layers_of_groups(params)])


def drop_attention(params: Params, config: Config, layers: Sequence[int]) -> tuple[Params, Config]:
    """Remove the mixers of some layers of the model, and their KV cache (arXiv:2406.15786).

    Raises ValueError if a layer does not exist or another one uses its slots.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> drop_attention(init(config, jax.random.key(0)), config, [1])[1].mixers[1]
    Dropped()
    """
    absent = [i for i in layers if not 0 <= i < config.layers]
    if absent:
        raise ValueError(f"layers {absent} are not of 0 to {config.layers - 1}")
    kept = tuple(Dropped() if i in layers else mixer_of(config, i) for i in range(config.layers))
    smaller = dataclasses.replace(config, mixers=kept)
    gone = {i: {*mixer_of(config, i).shapes(config), "attn_norm", "attn_post_norm"} for i in layers}
    old = _one_by_one(params, config)["layers"]
    new = tuple({n: w for n, w in p.items() if n not in gone.get(i, ())} for i, p in enumerate(old))
    return regroup({**params, "layers": new}, plan(smaller)), smaller


def insert_cross_attention(
    params: Params, config: Config, before: Sequence[int], word: CrossAttention, key: Array
) -> tuple[Params, Config]:
    """Insert layers of cross-attention and gated MLP before layers `before`: XC-Cache (arXiv:2404.15420).

    The lowest one holds the context, and the others share it. Their output maps start at zero, so that the
    model is initially unchanged; the paper's code starts them at random. The old parameters are the same
    arrays: train the new ones alone. Every layer must be plain attention. Raises ValueError if a layer is not
    there.

    >>> import jax
    >>> from kvjax.models.params import init
    >>> config = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
    >>> params, wider = insert_cross_attention(
    ...     init(config, jax.random.key(0)), config, [1], CrossAttention(width=16), jax.random.key(1)
    ... )
    >>> [type(mixer).__name__ for mixer in wider.mixers], len(params["layers"])
    (['Attention', 'CrossAttention', 'Attention'], 3)
    """
    absent = [i for i in before if not 0 <= i < config.layers]
    if absent or not before or len(set(before)) != len(before):
        raise ValueError(f"before={list(before)} must name layers of 0 to {config.layers - 1}, each once")
    if any(mixer_of(config, i) != Attention() for i in range(config.layers)):
        raise ValueError("inserting layers is defined for models whose layers are all plain attention")
    first = min(before)
    # The old layers in their new order; None for an inserted one.
    order = [i for layer in range(config.layers) for i in [None] * (layer in before) + [layer]]
    reads = dataclasses.replace(word, source=first)
    mixers = tuple(
        Attention() if i is not None else word if at == first else reads for at, i in enumerate(order)
    )
    wider = dataclasses.replace(
        config,
        layers=len(order),
        mixers=mixers,
        windows=tuple(None if i is None else config.window(i) for i in order) if config.windows else (),
        mlps=tuple(GATED_MLP if i is None else config.mlps[i] for i in order) if config.mlps else (),
    )
    fresh = iter(_new_layers(params, wider, len(before), word, key))
    old = _one_by_one(params, config)["layers"]
    layers = tuple(next(fresh) if i is None else old[i] for i in order)
    return regroup({**params, "layers": layers}, plan(wider)), wider


def _new_layers(params: Params, config: Config, count: int, word: CrossAttention, key: Array) -> list[Params]:
    """Random layers of cross-attention and gated MLP whose output maps are zero."""
    alone = dataclasses.replace(config, layers=count, mixers=(word,) * count, windows=(), mlps=(), vocab=1)
    made = init(alone, key, params["embed"].dtype, plan(alone, stacked=False))["layers"]
    return [{n: jnp.zeros_like(w) if n in ("o", "down") else w for n, w in p.items()} for p in made]


def _one_by_one(params: Params, config: Config) -> Params:
    return regroup(params, plan(config, stacked=False))
