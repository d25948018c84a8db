"""Lattice: a memory of unit slots, each moved by one gradient step per token, orthogonally to itself."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dtypes import wide

LatticeState = Float[Array, "B H M V"]


def lattice(
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    step: Float[Array, "B T H"],
    *,
    initial_state: LatticeState | None = None,
    slots: Float[Array, "H M V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], LatticeState]:
    """Lattice (Karami et al., 2025, arXiv:2504.05646), the decoding objective: an orthogonal online update.

    With n_i = s_i / |s_i|, a step on |v - sum_i k_i n_i|^2 / 2 moves slot i across n_i only; o is read after:

        e   = v - sum_j k_j n_j
        s_i = s_i + step k_i (I - n_i n_i') e / |s_i|
        o   = sum_i q_i n_i

    k and q are coordinates over the M slots. The state enters through its norms and through e: the recurrence
    is nonlinear and no exact parallel form exists, so this is a scan over tokens, in prefill and training.
    Not implemented: the paper's chunk-wise approximation for training, its gates and other objectives, and
    the normalisation of slots after every step that descriptions of it mention (here norms only grow, and
    damp later steps). A zero slot has no direction, so a row starts from `slots`, a learned parameter, and so
    does every new segment; `initial_state` continues a row.

    Raises ValueError when `slots` is needed and missing.

    >>> o, state = lattice(*[jnp.ones((1, 2, 1, 2))] * 3, jnp.ones((1, 2, 1)), slots=jnp.eye(2)[None])
    >>> o.shape, state.shape
    ((1, 2, 1, 2), (1, 1, 2, 2))
    """
    if slots is None and (initial_state is None or segments is not None):
        raise ValueError(
            "lattice needs slots [H, M, V] to start a row or a segment from: zero has no direction; "
            "pass slots=, or an initial_state and no segments"
        )
    dtype = wide(v)
    q, k, v, rate = (x.astype(dtype) for x in (q, k, v, step))
    if mask is not None:
        rate = jnp.where(mask[..., None], rate, jnp.zeros((), dtype))
        k, v = (jnp.where(mask[..., None, None], x, jnp.zeros((), dtype)) for x in (k, v))
    shape = (*q.shape[:1], *q.shape[2:], v.shape[-1])
    start = None if slots is None else jnp.broadcast_to(slots[None].astype(dtype), shape)
    state = start if initial_state is None else initial_state.astype(dtype)

    def body(state: Array, chunk: TokenChunk) -> tuple[Array, Array]:
        q, k, v, rate = (x[:, 0] for x in chunk.tokens)
        if start is not None:
            fresh = (chunk.number[:, 0] != chunk.before)[:, None, None, None]
            state = jnp.where(fresh, start, state)
        state = _moved(state, k, v, rate)
        return state, jnp.einsum("bhm,bhmv->bhv", q, state / _norm(state))[:, None]

    state, out = scan_chunks(body, state, (q, k, v, rate), size=1, segments=segments)
    return out, state


def _norm(state: LatticeState) -> Float[Array, "B H M 1"]:
    return jnp.linalg.norm(state, axis=-1, keepdims=True)


def _moved(
    state: LatticeState, k: Float[Array, "B H M"], v: Float[Array, "B H V"], rate: Float[Array, "B H"]
) -> LatticeState:
    """One gradient step; each slot moves at a right angle to itself."""
    norm = _norm(state)
    unit = state / norm
    rest = v - jnp.einsum("bhm,bhmv->bhv", k, unit)
    along = jnp.einsum("bhmv,bhv->bhm", unit, rest)
    across = rest[:, :, None] - unit * along[..., None]
    return state + (rate[..., None] * k)[..., None] * across / norm
