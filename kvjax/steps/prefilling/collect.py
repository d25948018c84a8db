"""What new tokens attend to in a layer, and how observations are carried by rows and passed to owners."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.select import ComputedTokens
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Carried, Inputs
from kvjax.keep.observations.observe import Mass
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.transformer import unembed
from kvjax.ops.attention.union import Keys
from kvjax.state.cache import GroupState, Paged, Pages, Segment
from kvjax.state.codes import Codec, dense, encode, with_arrays
from kvjax.state.page_gather import gather_pages

# How many tokens' logits are computed at a time for the surprisal of the next tokens.
_STRIP = 256


def past_sets(layer: Layer, state: GroupState, pools: tuple[Pages, ...]) -> list[Keys]:
    """Return what a layer attends to beside new tokens: its slots, those of the layer it reads, or both."""
    slots, values = layer.taken.get("slots"), layer.taken.get("slot values")
    if slots is not None:
        return [_keys(s, 0, pools) for s in slots.state.parts]
    mine = [_keys(s, layer.index, pools) for s in state.parts]
    if values is None:
        return mine
    return [a._replace(v=_keys(s, 0, pools).v) for a, s in zip(mine, values.state.parts, strict=True)]


def _keys(segment: Segment, index: int | Array, pools: tuple[Pages, ...]) -> Keys:
    one = segment.layer(index)
    return gather_pages(one, pools[one.pool]) if isinstance(one, Paged) else one.keys()


def decoded(
    gm: GroupMethod,
    layer: Layer,
    pos: Int[Array, "B T"],
    computed: tuple[Float[Array, "B K T H"], Float[Array, "B K T V"] | None],
) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T V"] | None]:
    """Keys and values of new tokens as a decode step would read them from slots just written.

    Keys are rotated or not, as they are stored.
    """
    mine = jax.tree.map(lambda x: x[layer.index], gm.codec_arrays)

    def back(x: Array, codec: Codec | None) -> Array:
        coded = dense(with_arrays(encode(x, codec, mine), mine))
        return jnp.where((pos < gm.sinks)[:, None, :, None], x, coded) if gm.sinks else coded

    (key_codec, value_codec), (k, v) = gm.codecs_of_new, computed
    return back(k, key_codec), None if v is None else back(v, value_codec)


def carried_after(o: Carried, inputs: Inputs, layer: Layer, state: GroupState) -> Any:
    """Compute what rows carry of an observation after the new tokens; of all, if nothing was carried yet."""
    before = state.rows.get(key_of(o))
    if before is None:
        return o.carry(o.start(inputs), inputs)
    return o.carry(jax.tree.map(lambda x: x[layer.index], before), inputs)


def surprisals(
    params: Params,
    x: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    pos: Int[Array, "B T"],
    config: Config,
) -> Float[Array, "B T"]:
    """-log p of every new token by the logits before it; 0 for the first one and for padding.

    Computed strip by strip, so that no array of all tokens' logits exists.
    """
    t = x.shape[1]
    strip = min(_STRIP, t)
    wide = jnp.pad(x, ((0, 0), (0, -t % strip), (0, 0)))
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + -t % strip)))

    def one(at: tuple[Float[Array, "B S D"], Int[Array, "B S"]]) -> Float[Array, "B S"]:
        p = jax.nn.log_softmax(unembed(params, at[0], config).astype(jnp.float32))
        return -jnp.take_along_axis(p, at[1][..., None], axis=-1)[..., 0]

    split = lambda y: jnp.moveaxis(y.reshape(y.shape[0], -1, strip, *y.shape[2:]), 1, 0)  # noqa: E731
    found = jax.lax.map(one, (split(wide), split(following)))
    found = jnp.moveaxis(found, 0, 1).reshape(x.shape[0], -1)[:, : t - 1]
    return jnp.where(pos >= 0, jnp.pad(found, ((0, 0), (1, 0))), 0.0)


def by_owner(
    gms: tuple[GroupMethod, ...], config: Config, found: tuple[Any, ...], masses: tuple[Mass, ...]
) -> tuple[ComputedTokens | dict[str, Array] | None, ...]:
    """Pass the observations of layers that read another layer's slots to the layer that owns the slots."""
    out: list[Any] = list(found)
    group_of = {gm.first: i for i, gm in enumerate(gms)}
    for i, gm in enumerate(gms):
        if gm.kind != "reads":
            continue
        at = mixer_of(config, gm.first).source_of("slots")
        assert at is not None
        source = group_of[at]
        for layer in range(jax.tree.leaves(out[i])[0].shape[0] if jax.tree.leaves(out[i]) else 0):
            seen = jax.tree.map(lambda x, at=layer: x[at : at + 1], out[i])
            own = out[source]
            joined = tuple(
                a | {key_of(o): o.join(a[key_of(o)], b[key_of(o)]) for o in masses}
                for a, b in zip(own.masses, seen.masses, strict=True)
            )
            out[source] = own._replace(masses=joined, readers=(*own.readers, seen.observed))
        out[i] = None
    return tuple(out)
