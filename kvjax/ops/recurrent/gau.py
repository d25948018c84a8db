"""FLASH: squared-ReLU attention inside a chunk, linear attention over the chunks before it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, arrange, refill, scan_chunks
from kvjax.ops.base.dtypes import wide


class GAUState(NamedTuple):
    """The sum of k v' / C over finished chunks, and the open chunk, with `length` of its C slots in use."""

    total: Float[Array, "B K V"]
    quad_k: Float[Array, "B C K"]
    lin_k: Float[Array, "B C K"]
    v: Float[Array, "B C V"]
    length: Int[Array, "B"]


def mixed_chunk_attention(
    quad_q: Float[Array, "B T K"],
    quad_k: Float[Array, "B T K"],
    lin_q: Float[Array, "B T K"],
    lin_k: Float[Array, "B T K"],
    v: Float[Array, "B T V"],
    *,
    chunk: int,
    initial_state: GAUState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
) -> tuple[Float[Array, "B T V"], GAUState]:
    """FLASH (Hua et al., 2022, arXiv:2202.10447): mixed chunk attention, causal, one head.

    With C = `chunk`, out = sum_j relu(q.k_j / C)^2 v_j over the tokens j up to itself in its chunk of C
    tokens, plus q_lin' S with S the sum of k_lin v' / C over all earlier chunks. Nothing is normalised, so C
    is part of the function. The model computes the four queries and keys, which are scaled and shifted copies
    of one vector, and the gate and rotary embedding.

    Differences from the paper: no relative position bias inside the square.

    Raises ValueError if the open chunk of `initial_state` does not have `chunk` slots.

    >>> x = jnp.ones((1, 3, 1))
    >>> o, state = mixed_chunk_attention(x, x, x, x, x, chunk=2)
    >>> o[0, :, 0].tolist(), state.total.tolist(), state.length.tolist()
    ([0.25, 0.5, 1.25], [[[1.0]]], [1])
    """
    dtype = wide(v)
    tokens = tuple(x.astype(dtype) for x in (quad_q, quad_k, lin_q, lin_k, v))
    b, t, width = quad_k.shape
    if initial_state is None:
        shapes = (b, width, v.shape[-1]), (b, chunk, width), (b, chunk, width), (b, chunk, v.shape[-1])
        total, *slots = (jnp.zeros(shape, dtype) for shape in shapes)
        length = jnp.zeros((b,), jnp.int32)
    else:
        total, *slots = (x.astype(dtype) for x in initial_state[:-1])
        length = initial_state.length
    state = GAUState(total, slots[0], slots[1], slots[2], length)
    if state.v.shape[1] != chunk:
        raise ValueError(f"a state of chunks of {state.v.shape[1]} tokens, but chunk={chunk}")
    size = 1 if recurrent else min(chunk, t)
    body = partial(_one_chunk, block=chunk)
    state, out = scan_chunks(body, state, tokens, size=size, segments=segments, mask=mask)
    return out, state


def _one_chunk(state: GAUState, chunk: TokenChunk, *, block: int) -> tuple[GAUState, Array]:
    """Read new tokens after the open chunk of their row, which they may finish and open the next one."""
    quad_q, quad_k, lin_q, lin_k, v = chunk.tokens
    at = arrange(chunk, state.length, slots=block, block=block)
    quad_k, lin_k, v = (
        jnp.concatenate(pair, 1)
        for pair in zip((state.quad_k, state.lin_k, state.v), (quad_k, lin_k, v), strict=True)
    )
    size = jnp.asarray(block, v.dtype)
    apart = at.block[:, -quad_q.shape[1] :, None] - at.block[:, None]
    inside = jax.nn.relu(jnp.einsum("bik,bjk->bij", quad_q, quad_k) / size) ** 2
    across = jnp.einsum("bik,bjk->bij", lin_q, lin_k) / size
    weights = jnp.where(at.seen, jnp.where(apart == 0, inside, across), 0)
    past = jnp.where(at.carried[:, :, None], jnp.einsum("bik,bkv->biv", lin_q, state.total), 0)
    out = past + jnp.einsum("bij,bjv->biv", weights, v)

    finished = jnp.where(at.leaves[:, :, None], lin_k, 0) / size
    total = jnp.where(at.stays[:, None, None], state.total, 0) + jnp.einsum("bjk,bjv->bkv", finished, v)
    return GAUState(total, refill(quad_k, at), refill(lin_k, at), refill(v, at), at.length), out
