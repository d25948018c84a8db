"""Mamba's selective scan: every channel has a few states, whose decays and inputs depend on the token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import Chunk, scan_chunks
from kvjax.ops.base.dtypes import wide

# Tokens whose states exist at the same time, [B, CHUNK, D, N].
CHUNK = 32

ScanState = Float[Array, "B D N"]


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
    """(y, last state) of h = e^(dt a) h + dt x b', y = h c + skip x, in promote(float32, input).

    Mamba (Gu and Dao, 2023, arXiv:2312.00752), algorithm 2 with the simplified discretisation of b that its
    code has. dt > 0 and a < 0 are what softplus and -exp have made. A parallel prefix of (e^(dt a), dt x b')
    within chunks of 32 tokens, which only ever multiplies decays, so nothing overflows; token by token where
    `recurrent`. A gradient computes the states of a chunk anew. Tokens that mask leaves out change no state.

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

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    @jax.checkpoint
    def body(state: Array, chunk: Chunk) -> tuple[Array, Array]:
        x, dt, b, c = chunk.tokens
        previous = jnp.concatenate([chunk.before[:, None], chunk.number[:, :-1]], 1)
        goes_on = (chunk.number == previous)[..., None, None]
        decay = jnp.where(goes_on, jnp.exp(dt[..., None] * a[None, None]), jnp.zeros((), dtype))
        new = (dt * x)[..., None] * b[:, :, None]
        new = new.at[:, 0].add(decay[:, 0] * state)
        _, states = jax.lax.associative_scan(after, (decay, new), axis=1)
        return states[:, -1], jnp.einsum("btdn,btn->btd", states, c)

    size = 1 if recurrent else min(CHUNK, x.shape[1])
    state, out = scan_chunks(body, start, (x, dt, b, c), size=size, segments=segments)
    return out + skip[None, None] * x, state
