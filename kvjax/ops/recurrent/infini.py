"""Infini-attention: causal softmax within a segment, and a linear memory of all segments before it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, arrange, refill, scan_chunks
from kvjax.ops.base.dtypes import wide


class InfiniState(NamedTuple):
    """The state of a row. S = segment_tokens; W = V + 1, where the last channel is the normaliser z.

    memory: the sum over finished segments. opened: what the open segment will add to it, already summed, so
    that the end of a segment costs a decode step no more than any token. k, v: the open segment for local
    attention, k as rotated by the caller, zero from `length` on; length < S.
    """

    memory: Float[Array, "B H K W"]
    opened: Float[Array, "B H K W"]
    k: Float[Array, "B S H K"]
    v: Float[Array, "B S H V"]
    length: Int[Array, "B"]


class _Tokens(NamedTuple):
    """The inputs of tokens: local_q is scaled; the features phi_q and phi_k read and write the memory."""

    local_q: Float[Array, "B T H K"]
    local_k: Float[Array, "B T H K"]
    phi_q: Float[Array, "B T H K"]
    phi_k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]


def infini_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "H"],
    *,
    segment_tokens: int,
    delta: bool = False,
    q_local: Float[Array, "B T H K"] | None = None,
    k_local: Float[Array, "B T H K"] | None = None,
    initial_state: InfiniState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], InfiniState]:
    """Infini-attention (Munkhdalai et al., 2024, arXiv:2404.07143): local softmax plus compressive memory.

    Segment n of `segment_tokens` tokens, with phi = elu + 1 and M, z from the segments before it:

        memory = phi(q)' M / phi(q)' z              (0 in the first segment)
        o      = sigmoid(beta) memory + (1 - sigmoid(beta)) local causal softmax
        M     += sum_j phi(k_j) (v_j - [delta] phi(k_j)' M / phi(k_j)' z)',   z += sum_j phi(k_j)

    `segments` numbers packed documents, not these segments: a new document starts with an empty memory and a
    segment of its own. Rows may be at different places of their segments. q_local, k_local: q and k already
    rotated; only the local branch uses positions. scale (of local logits): K^-0.5 unless given.

    Raises ValueError for one of q_local and k_local without the other, and for a state of other segments.

    >>> x = jnp.ones((1, 5, 1, 2))
    >>> o, state = infini_attention(x, x, x, jnp.zeros(1), segment_tokens=2)
    >>> o[0, :, 0, 0].tolist(), state.length.tolist()  # no memory yet in the first two
    ([0.5, 0.5, 1.0, 1.0, 1.0], [1])
    """
    if (q_local is None) != (k_local is None):
        raise ValueError("q_local and k_local are rotated together: pass both or neither")
    if initial_state is not None and initial_state.k.shape[1] != segment_tokens:
        raise ValueError(
            f"initial_state has segments of {initial_state.k.shape[1]} tokens and segment_tokens is "
            f"{segment_tokens}: a row cannot change it on its way"
        )
    dtype = wide(v)
    q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
    local_q = q if q_local is None else q_local.astype(dtype)
    local_k = k if k_local is None else k_local.astype(dtype)
    local_q = local_q * jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    tokens = _Tokens(local_q, local_k, jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v)
    if mask is not None:
        tokens = jax.tree.map(lambda x: jnp.where(mask[..., None, None], x, jnp.zeros((), dtype)), tokens)
    state = empty_state(k, v, segment_tokens) if initial_state is None else initial_state
    state = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, state)
    body = functools.partial(_step if recurrent else _block, delta=delta)
    size = 1 if recurrent else min(segment_tokens, v.shape[1])
    state, (memory, local) = scan_chunks(body, state, tokens, size=size, segments=segments, mask=mask)
    gate = jax.nn.sigmoid(beta)[None, None, :, None]
    return gate * memory + (1 - gate) * local, state


def empty_state(k: Float[Array, "B T H K"], v: Float[Array, "B T H V"], segment_tokens: int) -> InfiniState:
    """Make the state of rows without tokens, for keys and values of these shapes."""
    b, _, h, width = k.shape
    dtype = wide(v)
    memory = jnp.zeros((b, h, width, v.shape[-1] + 1), dtype)
    slots = jnp.zeros((b, segment_tokens, h, width), dtype)
    values = jnp.zeros((b, segment_tokens, h, v.shape[-1]), dtype)
    return InfiniState(memory, memory, slots, values, jnp.zeros((b,), jnp.int32))


def _recall(phi: Float[Array, "B C H K"], memory: Float[Array, "B H K W"]) -> Float[Array, "B C H V"]:
    """Compute phi' M / phi' z, and 0 for an empty memory."""
    out = jnp.einsum("bchk,bhkw->bchw", phi, memory)
    norm = out[..., -1:]
    return jnp.where(norm > 0, out[..., :-1] / jnp.where(norm > 0, norm, 1.0), 0.0)


def _written(tokens: _Tokens, known: Float[Array, "B C H V"], delta: bool) -> Float[Array, "B C H W"]:
    """Return what a key writes: its value, or (delta) what the memory does not recall of it; and 1 for z."""
    return jnp.concatenate([tokens.v - known if delta else tokens.v, jnp.ones_like(tokens.v[..., :1])], -1)


def _added(
    tokens: _Tokens, written: Float[Array, "B C H W"], chosen: Bool[Array, "B C"]
) -> Float[Array, "B H K W"]:
    """Compute what the chosen tokens add to a memory; the features of tokens left out are zero."""
    return jnp.einsum("bchk,bchw->bhkw", jnp.where(chosen[..., None, None], tokens.phi_k, 0.0), written)


def _attend(
    q: Float[Array, "B C H K"],
    k: Float[Array, "B E H K"],
    v: Float[Array, "B E H V"],
    seen: Bool[Array, "B C E"],
) -> Float[Array, "B C H V"]:
    p = jax.nn.softmax(jnp.einsum("bchk,behk->bhce", q, k), where=seen[:, None])
    return jnp.einsum("bhce,behv->bchv", p, v)


def _step(state: InfiniState, chunk: TokenChunk, delta: bool) -> tuple[InfiniState, tuple[Array, Array]]:
    """One token of every row: (new state, (memory, local) output)."""
    tokens: _Tokens = chunk.tokens
    fresh, real = chunk.number[:, 0] != chunk.before, chunk.real[:, 0]
    b, size = state.k.shape[:2]
    state = _cleared(state, fresh)
    row, slot = jnp.arange(b), jnp.where(real, state.length, size)
    k = state.k.at[row, slot].set(tokens.local_k[:, 0], mode="drop")
    v = state.v.at[row, slot].set(tokens.v[:, 0], mode="drop")
    length = state.length + real.astype(jnp.int32)
    seen = jnp.arange(size, dtype=jnp.int32)[None] < length[:, None]
    local = _attend(tokens.local_q, k, v, seen[:, None])
    read = _recall(tokens.phi_q, state.memory)
    written = _written(tokens, _recall(tokens.phi_k, state.memory), delta)
    opened = state.opened + _added(tokens, written, chunk.real)

    full = length == size
    memory = state.memory + jnp.where(full[:, None, None, None], opened, 0.0)
    state = _cleared(InfiniState(memory, opened, k, v, length), full)
    return state._replace(memory=memory), (read, local)


def _cleared(state: InfiniState, rows: Bool[Array, "B"]) -> InfiniState:
    return jax.tree.map(
        lambda x: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros((), x.dtype), x), state
    )


def _block(state: InfiniState, chunk: TokenChunk, delta: bool) -> tuple[InfiniState, tuple[Array, Array]]:
    """`_step` for up to S tokens at once, which span at most the entering segment and the next one."""
    tokens: _Tokens = chunk.tokens
    size = state.k.shape[1]
    at = arrange(chunk, state.length, slots=size, block=size)
    k, v = jnp.concatenate([state.k, tokens.local_k], 1), jnp.concatenate([state.v, tokens.v], 1)
    segment = at.block[:, size:]
    local = _attend(tokens.local_q, k, v, at.seen & (at.block[:, None] == segment[:, :, None]))

    # Tokens after the end of the entering segment have one more segment in their memory.
    after_first = at.carried & (segment > 0)
    carried, late = (x[..., None, None] for x in (at.carried, after_first))
    known = jnp.where(carried, _recall(tokens.phi_k, state.memory), 0.0)
    ended = _added(tokens, _written(tokens, known, delta), at.carried & ~after_first)
    memory = state.memory + state.opened + ended
    known = jnp.where(late, _recall(tokens.phi_k, memory), known)
    read = jnp.where(carried, _recall(tokens.phi_q, state.memory), 0.0)
    read = jnp.where(late, _recall(tokens.phi_q, memory), read)

    written, leaves = _written(tokens, known, delta), at.leaves[:, size:]
    before, opened = (jnp.where(at.stays[:, None, None, None], x, 0.0) for x in (state.memory, state.opened))
    full = at.leaves.any(1)[:, None, None, None]
    left = opened + _added(tokens, written, leaves)
    rest = _added(tokens, written, (chunk.number == chunk.number[:, -1:]) & ~leaves)
    state = InfiniState(
        before + jnp.where(full, left, 0.0),
        jnp.where(full, 0.0, opened) + rest,
        refill(k, at),
        refill(v, at),
        at.length,
    )
    return state, (read, local)
