"""Parameters: their shapes, their initial values, and how equal layers are stacked."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.models.config import Config
from kvjax.models.exchange import published
from kvjax.models.feed_forward import mlp_of
from kvjax.models.layer_embeddings import LAYER_EMBEDDINGS, top_shapes
from kvjax.models.layers import Params, Shapes
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.stacking import Group, entries, groups_in, in_entries, layers_of_groups, span
from kvjax.models.streams import STREAMS, stream_shapes


def layer_kind(config: Config, layer: int) -> tuple[object, ...]:
    """Return the properties that must be equal in stacked layers."""
    beside = config.inputs[layer] if config.inputs else None
    return config.window(layer), mixer_of(config, layer), mlp_of(config, layer), beside


def apart(config: Config) -> frozenset[int]:
    """Find the layers from which others take anything; each is alone in its group."""
    return frozenset(published(config))


# The most kinds of layers that take turns in a pattern.
LONGEST_PATTERN = 8


def plan(config: Config, stacked: bool | None = None, patterns: bool = True) -> tuple[Group, ...]:
    """How the layers are stacked: in maximal runs of equal layers on TPU, one by one elsewhere.

    XLA on CPU and GPU copies a layer's slice of stacked weights at every step; on TPU one scan over the stack
    compiles fast and copies nothing. The first two layers are never stacked, because several methods exempt
    them, nor are layers that others read. Kinds of layers that take turns up to the end, such as three of
    linear attention and one of attention, are stacked as a pattern where that makes fewer layers to compile.
    """
    if stacked is None:
        stacked = jax.default_backend() == "tpu"
    if not stacked:
        return tuple(Group(i, 1) for i in range(config.layers))
    return _around_pattern(config) if patterns else runs(config, range(config.layers))


def _around_pattern(config: Config) -> tuple[Group, ...]:
    """Group runs of equal layers, and a pattern if there is one."""
    layers = range(config.layers)
    kinds = [layer_kind(config, i) for i in layers]
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    start, period = _repeats([number[kind] for kind in kinds])
    end = config.layers - (config.layers - start) % period
    if period < 2 or apart(config) or period >= len(runs(config, layers[start:end])):
        return runs(config, layers)
    pattern = (Group(start + i, (end - start) // period, period) for i in range(period))
    return (*runs(config, layers[:start]), *pattern, *runs(config, layers[end:]))


def _repeats(kinds: list[int]) -> tuple[int, int]:
    """(layer, period): from this layer on, 2 or a later one, kinds repeat to the end; (0, 1): they do not.

    >>> _repeats([0, 1, 0, 0, 1, 0, 0, 1, 0])
    (2, 3)
    """
    found = []
    for period in range(1, LONGEST_PATTERN + 1):
        start = max(len(kinds) - period, 2)
        while start > 2 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        if len(kinds) - start >= 2 * period:
            found.append((start, period))
    return min(found, default=(0, 1))


def runs(config: Config, layers: range) -> tuple[Group, ...]:
    """Neighbouring layers in maximal runs of equal ones."""
    if not layers:
        return ()
    cuts = [layers[0]]
    for i in layers[1:]:
        alone = {i, i - 1} & apart(config)
        if i == 2 or alone or layer_kind(config, i) != layer_kind(config, i - 1):
            cuts.append(i)
    return tuple(Group(a, b - a) for a, b in zip(cuts, [*cuts[1:], layers[-1] + 1], strict=True))


def check_groups(config: Config, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Check and return `groups`; ValueError if they miss or repeat a layer or stack different kinds."""
    if [i for entry in entries(groups) for i in span(entry)] != list(range(config.layers)):
        raise ValueError(
            f"groups must name layers 0 to {config.layers - 1} once each and in order, got {groups}"
        )
    for g in groups:
        if len({layer_kind(config, i) for i in g.layers}) > 1:
            raise ValueError(
                f"{g} stacks layers of different windows, mixers or feed-forwards: plan() keeps them apart"
            )
        if g.size > 1 and apart(config) & {*g.layers}:
            raise ValueError(f"{g} stacks a layer that others read: plan() keeps it apart")
    return groups


# Of hidden states, in a layer.
STREAM_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")


def layer_shapes(config: Config, layer: int = 0) -> Shapes:
    """Return the name and shape of every parameter of one layer; weights multiply from the right."""
    words = {"attn": mixer_of(config, layer), "mlp": mlp_of(config, layer)}
    shapes = {**words["attn"].shapes(config), **words["mlp"].shapes(config)}
    halves = [half for half, word in words.items() if not word.absent]
    if config.norms in ("pre", "both"):
        shapes |= {f"{half}_norm": (config.d_model,) for half in halves}
    if config.norms == "parallel":
        shapes |= {"attn_norm": (config.d_model,)}
    if config.norms in ("post", "both"):
        shapes |= {f"{half}_post_norm": (config.d_model,) for half in halves}
    if config.norm_bias:
        shapes |= {f"{n}_bias": s for n, s in shapes.items() if n in STREAM_NORMS}
    return shapes | LAYER_EMBEDDINGS.shapes(config) | STREAMS.shapes(config)


def norm_shapes(config: Config) -> Shapes:
    """Return the name and shape of the parameters of norms outside the layers."""
    names = ["norm", "embed_norm"] if config.embed_norm else ["norm"]
    names += [f"{name}_bias" for name in names] if config.norm_bias else []
    return dict.fromkeys(names, (config.d_model,))


def shapes(config: Config, groups: tuple[Group, ...] | None = None) -> Params:
    """Return the tree of parameter shapes; the layers as one dict per group, stacked on a leading axis.

    A pattern's groups are one entry, a tuple of such dicts.
    """
    tree: Params = {"embed": (config.vocab, config.d_model)}
    if not config.tied:
        tree["unembed"] = (config.d_model, config.vocab)
    tree |= norm_shapes(config) | top_shapes(config) | stream_shapes(config)
    tree["layers"] = in_entries(
        groups or plan(config),
        lambda _, g: {n: (g.size, *s) for n, s in layer_shapes(config, g.first).items()},
    )
    return tree


def init(
    config: Config, key: Array, dtype: Any = jnp.float32, groups: tuple[Group, ...] | None = None
) -> Params:
    """Random parameters: matrices with variance 1 / fan-in, norms at one, biases at zero.

    Decay rates (`a_log`, `dt_bias`) start as in Mamba-2. The same key gives the same numbers whatever the
    `groups`.
    """
    tree = shapes(config, plan(config, stacked=False))
    layers = tree.pop("layers")
    name = jnp.dtype(dtype).name
    out = _draw(jax.random.fold_in(key, 0), tuple(tree.items()), config, name)
    drawn = [
        _draw(jax.random.fold_in(key, 1 + i), tuple(layer_shapes(config, i).items()), config, name)
        for i in range(len(layers))
    ]
    out["layers"] = tuple(jax.tree.map(lambda w: w[None], p) for p in drawn)
    return regroup(out, check_groups(config, groups or plan(config)))


# Random numbers take a third of a second per shape to compile, so one flat draw serves all equal layers.
@functools.partial(jax.jit, static_argnames=("sizes", "config", "dtype"))
def _draw(key: Array, sizes: tuple[tuple[str, tuple[int, ...]], ...], config: Config, dtype: str) -> Params:
    count = sum(math.prod(shape) for _, shape in sizes if len(shape) >= 2)
    noise, start = jax.random.normal(key, (count,), jnp.float32), 0
    out: Params = {}
    for name, shape in sizes:
        if name.endswith("norm"):
            out[name] = jnp.full(shape, 1.0 - config.norm_offset, dtype)
        elif name in ("a_log", "dt_bias"):
            out[name] = _decays(name, shape).astype(dtype)
        elif name == "layer_scale":
            out[name] = jnp.ones(shape, dtype)
        elif len(shape) < 2 or name.endswith("_bias"):
            out[name] = jnp.zeros(shape, dtype)
        else:
            stop = start + math.prod(shape)
            fan_in = shape[1] if name in ("embed", "layer_embed") else shape[-2]
            out[name] = (noise[start:stop].reshape(shape) * fan_in**-0.5).astype(dtype)
            start = stop
    return out


def _decays(name: str, shape: tuple[int, ...]) -> Array:
    """a_log = log of 1 .. 16; dt_bias such that softplus gives 0.001 .. 0.1, log-uniformly."""
    share = jnp.linspace(0.0, 1.0, math.prod(shape)).reshape(shape)
    if name == "a_log":
        return jnp.log(1 + 15 * share)
    dt = jnp.exp(math.log(1e-3) + share * math.log(1e2))
    return dt + jnp.log(-jnp.expm1(-dt))


def regroup(params: Params, groups: tuple[Group, ...]) -> Params:
    """Stack the layers of the same parameters as `groups` says."""
    now = groups_in(params)
    if now == groups:
        return params
    layers = {
        number: {name: leaf[i] for name, leaf in stack.items()}
        for stack, group in zip(layers_of_groups(params), now, strict=True)
        for i, number in enumerate(group.layers)
    }

    def stacked(_: int, group: Group) -> Params:
        return {name: jnp.stack([layers[i][name] for i in group.layers]) for name in layers[group.first]}

    return {**params, "layers": in_entries(groups, stacked)}
