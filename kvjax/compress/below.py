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
from kvjax.state.codes import BELOW, Codes, Taught, dense, encode, lent

# Decoded keys and values [Lg, B, K, S, H] of all slots of a body; no values if keys and values are one array.
Decoded = tuple[Array, Array | None]


def seeing(gm: GroupMethod, below: Decoded | None) -> GroupMethod:
    """Gives the group the decoded body of the group below, if its codecs use it."""
    if not gm.sees_below:
        return gm
    assert below is not None
    known = {name: x for name, x in zip(("key", "value"), below, strict=True) if x is not None}
    return gm.replaced(taught=dict(gm.taught) | {BELOW: known})


def of_slots(gm: GroupMethod, slots: int) -> GroupMethod:
    """Gives the group the first `slots` slots of the layer below, padded with empty ones."""
    taught = dict(gm.taught)
    if BELOW not in taught:
        return gm

    def sized(x: Array) -> Array:
        x = x[:, :, :, :slots]
        return jnp.pad(x, [(0, 0)] * 3 + [(0, slots - x.shape[3]), (0, 0)])

    return gm.replaced(taught=taught | {BELOW: {name: sized(x) for name, x in taught[BELOW].items()}})


def of_granules(gm: GroupMethod, row: Int[Array, "l B K F"]) -> Taught:
    """What codecs see when they encode the granules `row` of a body; rows below 0 are placeholders."""
    taught = dict(gm.taught)
    if BELOW not in taught:
        return taught
    within = jax.lax.broadcasted_iota(jnp.int32, (*row.shape, gm.granule), row.ndim)
    index = (jnp.maximum(row, 0)[..., None] * gm.granule + within).reshape(*row.shape[:3], -1, 1)
    rows = {name: jnp.take_along_axis(x, index, axis=3) for name, x in taught[BELOW].items()}
    return taught | {BELOW: rows}


def encoded_pair(
    gm: GroupMethod, k: Array, v: Array | None, taught: Taught | tuple[()]
) -> tuple[Array | Codes, Array | Codes | None]:
    """Keys and values encoded as the group stores them; the codec of values may see the decoded keys."""
    keys = encode(k, gm.codecs[0], taught)
    if v is None:
        return keys, None
    return keys, encode(v, gm.codecs[1], _with_own(keys, dict(taught)))


def _with_own(keys: Array | Codes, taught: Taught) -> Taught:
    if BELOW not in taught:
        return taught
    return taught | {BELOW: taught[BELOW] | {"own key": dense(lent(keys, taught))}}


def decoded(gm: GroupMethod, body: Slots, below: Decoded | None) -> Decoded:
    """Decodes the keys and values of a body."""
    taught = dict(seeing(gm, below).taught)
    keys = dense(lent(body.k, taught))
    return keys, None if body.v is None else dense(lent(body.v, _with_own(body.k, taught)))


def over_below(
    gm: GroupMethod, state: GroupState, below: Decoded | None
) -> tuple[GroupState, Decoded | None]:
    """The group with its body decoded, and the decoded arrays; unchanged if it has no body yet."""
    if not state.bodies:
        return state, None
    (body,) = state.bodies
    assert isinstance(body, Slots)
    k, v = decoded(gm, body, below)
    return dataclasses.replace(state, bodies=(dataclasses.replace(body, k=k, v=v),)), (k, v)
