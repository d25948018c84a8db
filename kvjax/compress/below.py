"""Codecs that look at the layer below: keys and values are encoded relative to that layer's decoded ones.

All groups then hold the same tokens in the same slots, since none evicts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.compress.group import GroupMethod
from kvjax.state.cache import GroupState, Slots
from kvjax.state.codes import BELOW, CodecArrays, Codes, dense, encode, with_arrays

# Decoded keys and values [Lg, B, K, S, H] of all slots of a body; no values if keys and values are one array.
Decoded = tuple[Array, Array | None]


def seeing(gm: GroupMethod, below: Decoded | None) -> GroupMethod:
    """Return the group with the decoded body of the group below, if its codecs use it."""
    if not gm.sees_below:
        return gm
    assert below is not None
    known = {name: x for name, x in zip(("key", "value"), below, strict=True) if x is not None}
    return gm.replaced(codec_arrays=dict(gm.codec_arrays) | {BELOW: known})


def of_slots(gm: GroupMethod, slots: int) -> GroupMethod:
    """Return the group with the first `slots` slots of the layer below, padded with empty ones."""
    codec_arrays = dict(gm.codec_arrays)
    if BELOW not in codec_arrays:
        return gm

    def sized(x: Array) -> Array:
        x = x[:, :, :, :slots]
        return jnp.pad(x, [(0, 0)] * 3 + [(0, slots - x.shape[3]), (0, 0)])

    return gm.replaced(
        codec_arrays=codec_arrays | {BELOW: {name: sized(x) for name, x in codec_arrays[BELOW].items()}}
    )


def of_granules(gm: GroupMethod, row: Int[Array, "l B K F"]) -> CodecArrays:
    """Return what codecs see when they encode the granules `row` of a body; rows below 0 are placeholders."""
    codec_arrays = dict(gm.codec_arrays)
    if BELOW not in codec_arrays:
        return codec_arrays
    within = jax.lax.broadcasted_iota(jnp.int32, (*row.shape, gm.granule), row.ndim)
    index = (jnp.maximum(row, 0)[..., None] * gm.granule + within).reshape(*row.shape[:3], -1, 1)
    rows = {name: jnp.take_along_axis(x, index, axis=3) for name, x in codec_arrays[BELOW].items()}
    return codec_arrays | {BELOW: rows}


def encoded_pair(
    gm: GroupMethod, k: Array, v: Array | None, codec_arrays: CodecArrays | tuple[()]
) -> tuple[Array | Codes, Array | Codes | None]:
    """Keys and values encoded as the group stores them; the codec of values may see the decoded keys."""
    keys = encode(k, gm.codecs[0], codec_arrays)
    if v is None:
        return keys, None
    return keys, encode(v, gm.codecs[1], _with_own(keys, dict(codec_arrays)))


def _with_own(keys: Array | Codes, codec_arrays: CodecArrays) -> CodecArrays:
    if BELOW not in codec_arrays:
        return codec_arrays
    return codec_arrays | {BELOW: codec_arrays[BELOW] | {"own key": dense(with_arrays(keys, codec_arrays))}}


def decoded(gm: GroupMethod, body: Slots, below: Decoded | None) -> Decoded:
    """Decode the keys and values of a body."""
    codec_arrays = dict(seeing(gm, below).codec_arrays)
    keys = dense(with_arrays(body.k, codec_arrays))
    return keys, None if body.v is None else dense(with_arrays(body.v, _with_own(body.k, codec_arrays)))


def over_below(
    gm: GroupMethod, state: GroupState, below: Decoded | None
) -> tuple[GroupState, Decoded | None]:
    """Return the group with its body decoded, and the decoded arrays; unchanged if it has no body yet."""
    if not state.bodies:
        return state, None
    (body,) = state.bodies
    assert isinstance(body, Slots)
    k, v = decoded(gm, body, below)
    return dataclasses.replace(state, bodies=(dataclasses.replace(body, k=k, v=v),)), (k, v)
