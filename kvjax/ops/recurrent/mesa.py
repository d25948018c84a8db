"""The Mesa layer: at every token, the ridge regression of all values so far on all keys, at the query."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import cholesky_solve, conjugate_gradient
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, chunked, scan, tokens_of

# For how many tokens matrices [H, K, K] exist at the same time in the exact form.
CHUNK = 16


class MesaState(NamedTuple):
    """Decayed sums of beta k k' and beta k v'."""

    kk: Float[Array, "B H K K"]
    kv: Float[Array, "B H K V"]


def mesa(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    ridge: Float[Array, "H K"],
    *,
    initial_state: MesaState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    iterations: int | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], MesaState]:
    """MesaNet (von Oswald et al., 2025, arXiv:2506.05233): o = Hkv' (Hkk + diag(ridge))^-1 q.

    Hkk = e^g Hkk + beta k k' and Hkv = e^g Hkv + beta k v', with log decays g <= 0, strengths beta >= 0 and a
    ridge > 0 per key channel. Without `iterations` every token's system is solved by Cholesky. With them it
    is solved by that many conjugate gradient steps, whose matrix products are linear attention in chunks, as
    in the paper: no matrix per token is stored. scale: a factor of q, 1 unless given.

    Differences from the paper: its solver may stop early; this one takes a fixed number of steps, from zero.

    >>> k, v = jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1, 1))
    >>> o, state = mesa(k, k, v, jnp.zeros((1, 3, 1)), jnp.ones((1, 3, 1)), jnp.ones((1, 1)))
    >>> [round(float(x), 3) for x in o[0, :, 0, 0]], float(state.kk[0, 0, 0, 0])
    ([0.5, 0.667, 0.75], 3.0)
    """
    width, dtype = k.shape[-1], wide(v)
    both = jnp.concatenate([k.astype(dtype), v.astype(dtype)], -1)
    t = tokens_of(q, k, both, g, write=beta, scale=1.0 if scale is None else scale, mask=mask)
    ridge = ridge.astype(dtype)
    sums = kk = None
    if initial_state is not None:
        # Solvers read a matrix or its transpose; the gradient must not depend on which.
        kk = ((initial_state.kk + jnp.swapaxes(initial_state.kk, 2, 3)) / 2).astype(dtype)
        sums = jnp.concatenate([kk, initial_state.kv.astype(dtype)], -1)
    keys = t._replace(v=t.v[..., :width])
    form = scan if recurrent else chunked
    if iterations is None:
        x = _exact(keys, kk, ridge, segments, 1 if recurrent else min(CHUNK, k.shape[1]))
    else:

        def matvec(p: Array) -> Array:
            return ridge[None, None] * p + form(keys._replace(q=p), kk, segments)[0]

        x = conjugate_gradient(matvec, t.q, iterations)
    out, sums = form(t._replace(q=x), sums, segments)
    return out[..., width:], MesaState(sums[..., :width], sums[..., width:])


def _exact(
    keys: RecurrenceInputs,
    kk: Float[Array, "B H K K"] | None,
    ridge: Float[Array, "H K"],
    segments: Int[Array, "B T"] | None,
    size: int,
) -> Float[Array, "B T H K"]:
    """(Hkk + diag(ridge))^-1 q of every token, from the matrices of `size` tokens at a time."""
    b, _, h, width = keys.k.shape
    diagonal = ridge[:, :, None] * jnp.eye(width, dtype=ridge.dtype)[None]

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    # The gradient recomputes the matrices, or it would store those of every token.
    @jax.checkpoint
    def body(state: Array, chunk: TokenChunk) -> tuple[Array, Array]:
        t = chunk.tokens
        previous = jnp.concatenate([chunk.before[:, None], chunk.number[:, :-1]], 1)
        goes_on = (chunk.number == previous)[:, :, None, None]
        decay = jnp.where(goes_on, jnp.exp(t.log_decay), 0.0).astype(t.k.dtype)[..., None]
        new = t.k[..., :, None] * t.v[..., None, :]
        new = new.at[:, 0].add(decay[:, 0] * state)
        _, sums = jax.lax.associative_scan(after, (decay, new), axis=1)
        return sums[:, -1], cholesky_solve(sums + diagonal[None, None], t.q)

    start = jnp.zeros((b, h, width, width), keys.k.dtype) if kk is None else kk
    return scan_chunks(body, start, keys, size=size, segments=segments)[1]
