"""Mamba's selective scan: every channel has a few states, with decays and inputs that depend on the token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dispatch import platform
from kvjax.ops.base.dtypes import wide

# For how many tokens states exist at the same time, [B, CHUNK, D, N], or are recomputed for a gradient.
CHUNK = 32

ScanState = Float[Array, "B D N"]


class ScanInputs(NamedTuple):
    """The inputs of the scan for consecutive tokens; goes_on: whether a token continues the past."""

    x: Float[Array, "B T D"]
    dt: Float[Array, "B T D"]
    b: Float[Array, "B T N"]
    c: Float[Array, "B T N"]
    goes_on: Bool[Array, "B T"]


def selective_scan(
    x: Float[Array, "B T D"],
    dt: Float[Array, "B T D"],
    a: Float[Array, "D N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    skip: Float[Array, "D"],
    *,
    initial_state: ScanState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
) -> tuple[Float[Array, "B T D"], ScanState]:
    """Return (y, last state) of h = e^(dt a) h + dt x b', y = h c + skip x, in promote(float32, input).

    Mamba (Gu and Dao, 2023, arXiv:2312.00752), algorithm 2 with the simplified discretisation of b in its
    code. dt > 0 and a < 0 are given after softplus and -exp. It is a parallel prefix sum of (e^(dt a), dt x
    b') within chunks of 32 tokens, which only multiplies decays, so nothing overflows; token by token with
    `recurrent`, and on CPUs, where a token's states fill a core and stay in its cache. The gradient
    recomputes the states of a chunk. Tokens that mask leaves out change no state.

    >>> one = jnp.ones((1, 2, 1))
    >>> y, state = selective_scan(one, one, jnp.full((1, 1), jnp.log(0.5)), one, one, jnp.zeros(1))
    >>> y[0, :, 0].tolist(), state.ravel().tolist()
    ([1.0, 1.5], [1.5])
    """
    dtype = wide(x)
    x, dt, a, b, c, skip = (y.astype(dtype) for y in (x, dt, a, b, c, skip))
    if mask is not None:
        dt = jnp.where(mask[..., None], dt, jnp.zeros((), dtype))
    shape = (x.shape[0], *a.shape)
    start = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)

    one_by_one = recurrent or platform() == "cpu"

    @jax.checkpoint
    def body(state: Array, chunk: TokenChunk) -> tuple[Array, Array]:
        previous = jnp.concatenate([chunk.before[:, None], chunk.number[:, :-1]], 1)
        x, dt, b, c = chunk.tokens
        tokens = ScanInputs(x, dt, b, c, chunk.number == previous)
        return _in_turn(state, a, tokens) if one_by_one else _side_by_side(state, a, tokens)

    size = min(CHUNK, x.shape[1])
    state, out = scan_chunks(body, start, (x, dt, b, c), size=size, segments=segments)
    return out + skip[None, None] * x, state


def _in_turn(
    state: ScanState, a: Float[Array, "D N"], tokens: ScanInputs
) -> tuple[ScanState, Float[Array, "B T D"]]:
    """(state, outputs) of tokens one after the other; a token that does not continue starts from zero."""

    def token(h: Array, at: ScanInputs) -> tuple[Array, Array]:
        kept = jnp.exp(at.dt[..., None] * a[None]) * h
        kept = jnp.where(at.goes_on[:, None, None], kept, jnp.zeros((), h.dtype))
        h = kept + (at.dt * at.x)[..., None] * at.b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, at.c)

    state, out = jax.lax.scan(token, state, jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), tokens))
    return state, jnp.moveaxis(out, 0, 1)


def _side_by_side(
    state: ScanState, a: Float[Array, "D N"], tokens: ScanInputs
) -> tuple[ScanState, Float[Array, "B T D"]]:
    """Like the step-by-step scan, by a parallel prefix sum: all states are in memory at once."""

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    x, dt, b, c, goes_on = tokens
    decay = jnp.exp(dt[..., None] * a[None, None])
    decay = jnp.where(goes_on[..., None, None], decay, jnp.zeros((), decay.dtype))
    new = (dt * x)[..., None] * b[:, :, None]
    new = new.at[:, 0].add(decay[:, 0] * state)
    _, states = jax.lax.associative_scan(after, (decay, new), axis=1)
    return states[:, -1], jnp.einsum("btdn,btn->btd", states, c)
