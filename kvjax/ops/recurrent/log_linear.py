"""Log-linear attention: a linear attention whose memory is one state per power of two of distance.

Log-Linear Attention (Guo, Yang, Goel, Xing, Dao, Kim, 2025, arXiv:2506.04761, section 3), over every member
of the recurrence of `kvjax.ops.recurrent.recurrence`, with or without erasing, with decays of heads or of
channels:

    A_r = (I - k_r p_r') Diag(exp g_r)
    o_t = scale sum_{s <= t} lambda_t[level(t, s)] (q_t' A_t A_{t-1} ... A_{s+1} k_s) v_s

level(t, s) is 0 for t = s, else the number of bits of t xor s, positions counting from 0. Tokens on one level
stay together on one level for every later token, so that each level is one state [K, V].

* Before token t, all levels below m = level(t, t - 1) become level m. A state has the levels that its last
  token saw, before this is done for the next. Level l >= 1 holds 2^(l - 1) tokens if bit l - 1 of the last
  token's position is set, else none.
* What is on level l at token u is on level max(l, level(t, u)) at every t >= u. (Let m = level(t, u): t has
  bit
  m - 1 and u has not, while u has bit l - 1 and the tokens of level l have not; u agrees with all in the bits
  above. The higher of the two bits decides, and they differ.) So chunks may begin anywhere: what entered a
  chunk is read on that level, and moves to it at the chunk's end.
* All levels share A, so merging is exact, and one linear map of a chunk serves all of them. Level weights
  multiply after the erasing: [tril(Q K') X * decay * lambda] V, X the inverse of the chunk's erasing.

n tokens need ceil(log2 n) + 1 levels (`levels_for`). With L fewer, everything further away is on the topmost
level, which keeps absorbing: min(level, L - 1). L = 1 is the plain member times lambda.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.on_mesh import OnMesh
from kvjax.ops.base.packed_sequences import segment_starts
from kvjax.ops.recurrent.log_linear_decode import log_linear_decode
from kvjax.ops.recurrent.log_linear_levels import (
    LevelState,
    empty_levels,
    level,
    levels_for,
    log_linear_step,
    merge,
    without,
)
from kvjax.ops.recurrent.recurrence import (
    CHUNK_SCALAR,
    CHUNK_VECTOR,
    RecurrenceInputs,
    StackedState,
    chunked,
    tokens_of,
)

LevelOutput = tuple[Float[Array, "B T H V"], LevelState]


def log_linear(
    tokens: RecurrenceInputs,
    level_scales: Float[Array, "B T H L"],
    state: LevelState | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    mask: Bool[Array, "B T"] | None = None,
    chunk: int | None = None,
    recurrent: bool = False,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> LevelOutput:
    """Run the log-linear form of the recurrence for `tokens`: in chunks, or token by token.

    Where `segments` changes, positions start again at 0 with empty levels; the first token continues `state`.
    Tokens that `mask` leaves out have no position and change no level, wherever they are; their outputs read
    the unchanged state. ValueError if the state has other levels than level_scales, or if a call without
    segments and mask has more tokens than its levels can separate. If positions are data (in decoding, or
    with a mask) nothing is raised, and the topmost level absorbs what is further away. implementation and on:
    as in `log_linear_decode`, for one token without segments; NotImplementedError if a forced one cannot
    run.

    >>> ones = jnp.ones((1, 3, 1, 1))
    >>> o, state = log_linear(tokens_of(ones, ones, ones), jnp.asarray([[[[1.0, 10.0, 100.0]]] * 3]))
    >>> o[0, :, 0, 0].tolist(), state.levels[0, :, 0, 0, 0].tolist(), state.next.tolist()
    ([1.0, 11.0, 201.0], [1.0, 0.0, 2.0], [3])
    """
    b, t = tokens.k.shape[:2]
    count, dtype = level_scales.shape[-1], tokens.v.dtype
    if state is None:
        state = empty_levels(tokens, count)
    held = state.levels.layers.shape[2] if isinstance(state.levels, StackedState) else state.levels.shape[1]
    if held != count:
        raise ValueError(f"the state has {held} levels and level_scales {count}: give both as many")
    if segments is None and mask is None and levels_for(t) > count:
        raise ValueError(
            f"{count} levels hold {2 ** (count - 1)} tokens apart, got {t} tokens: give level_scales "
            f"{levels_for(t)} levels, or a mask of ones if the topmost level is to hold all the others"
        )
    real = jnp.ones((b, t), bool) if mask is None else mask
    state = state._replace(next=state.next.astype(jnp.int32))
    if t == 1 and segments is None:
        token = jax.tree.map(lambda x: x[:, 0], tokens)
        out, state = log_linear_decode(
            state, token, level_scales[:, 0], real[:, 0], implementation=implementation, on=on
        )
        return out[:, None], state
    if implementation not in (None, "reference") or isinstance(state.levels, StackedState):
        raise NotImplementedError(
            f"{t} tokens have neither kernels nor a form over stacked states: give one token without segments"
        )
    state = state._replace(levels=state.levels.astype(dtype))
    fed = (tokens, level_scales.astype(dtype), segment_starts(segments, (b, t)), real)
    if recurrent:
        return _token_by_token(state, fed)
    size = chunk or (CHUNK_SCALAR if tokens.log_decay.shape[-1] == 1 else CHUNK_VECTOR)
    return _in_chunks(state, fed, min(size, max(t, 1)))


def log_linear_attention(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H *c"] | None,
    level_scales: Float[Array, "B T H L"],
    *,
    initial_state: LevelState | None = None,
    scale: float = 1.0,
    **how: Any,
) -> LevelOutput:
    """Log-linear Mamba-2 and GLA: o_t = sum_s lambda_t[level(t, s)] exp(G_t - G_s) (q_t' k_s) v_s.

    Log decays g are [B, T, H] as in the paper's Mamba-2 (the caller applies dt and the skip), [B, T, H, K] or
    None. `segments`, `mask`, `chunk` and `recurrent` are those of `log_linear`; with recurrent=True one token
    is a decode step. scale is 1, not K^-0.5: the level scales are learnt.

    >>> x = jnp.ones((1, 2, 1, 4))
    >>> o, state = log_linear_attention(x, x, x, None, jnp.ones((1, 2, 1, 3)))
    >>> _, state = log_linear_attention(x, x, x, None, jnp.ones((1, 2, 1, 3)), initial_state=state)
    >>> o[0, :, 0, 0].tolist(), state.next.tolist()
    ([4.0, 8.0], [4])
    """
    return log_linear(tokens_of(q, k, v, g, scale=scale), level_scales, initial_state, **how)


def log_linear_gated_delta(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H *c"] | None,
    beta: Float[Array, "B T H"],
    level_scales: Float[Array, "B T H L"],
    *,
    initial_state: LevelState | None = None,
    scale: float = 1.0,
    **how: Any,
) -> LevelOutput:
    """Log-linear Gated DeltaNet: every level becomes e^g (I - beta k k') of itself, level 0 gets beta k v'.

    Unit keys, beta in (0, 2); g as in `log_linear_attention`, so that with channels this is a log-linear KDA.

    >>> x, one = jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1))  # beta = 1 replaces what the key had
    >>> o, _ = log_linear_gated_delta(x, x, x, None, one, jnp.asarray([[[[1.0, 10.0, 100.0]]] * 3]))
    >>> o[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    tokens = tokens_of(q, k, v, g, write=beta, scale=scale)
    tokens = tokens._replace(erase=tokens.k * beta.astype(tokens.k.dtype)[..., None])
    return log_linear(tokens, level_scales, initial_state, **how)


def _restart(state: LevelState, fresh: Bool[Array, "B"]) -> tuple[Float[Array, "B L H K V"], Int[Array, "B"]]:
    """Empty the state (levels, next) in the rows where a segment begins."""
    assert not isinstance(state.levels, StackedState)
    levels = jnp.where(fresh[:, None, None, None, None], jnp.zeros((), state.levels.dtype), state.levels)
    return levels, jnp.where(fresh, 0, state.next)


def _token_by_token(state: LevelState, fed: tuple[RecurrenceInputs, Array, Array, Array]) -> LevelOutput:
    def body(s: LevelState, at: tuple[RecurrenceInputs, Array, Array, Array]) -> tuple[LevelState, Array]:
        token, scales, fresh, real = at
        out, s = log_linear_step(LevelState(*_restart(s, fresh)), token, scales, real)
        return s, out

    state, out = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), fed))
    return jnp.moveaxis(out, 0, 1), state


def _in_chunks(
    state: LevelState, fed: tuple[RecurrenceInputs, Array, Array, Array], size: int
) -> LevelOutput:
    b, t = fed[-1].shape
    count = -(-t // size)

    def cut(x: Array) -> Array:
        # Zero padding acts as tokens that the mask leaves out.
        padded = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    def body(s: LevelState, at: tuple[RecurrenceInputs, Array, Array, Array]) -> tuple[LevelState, Array]:
        out, s = _one_chunk(s, *at)
        return s, out

    state, out = jax.lax.scan(body, state, jax.tree.map(cut, fed))
    return jnp.moveaxis(out, 0, 1).reshape(b, count * size, *out.shape[3:])[:, :t], state


def _one_chunk(
    state: LevelState,
    tokens: RecurrenceInputs,
    scales: Float[Array, "B C H L"],
    fresh: Bool[Array, "B C"],
    real: Bool[Array, "B C"],
) -> tuple[Float[Array, "B C H V"], LevelState]:
    """One chunk, from any positions: sums over its own tokens j, and over the levels l that entered it."""
    levels, following = _restart(state, fresh[:, 0])
    tokens = without(tokens, real)
    size, count = real.shape[1], levels.shape[1]
    until = jnp.tril(jnp.ones((1, size, size), bool))
    segment = (until & fresh[:, None]).sum(-1, dtype=jnp.int32)
    mates = until & real[:, None] & (segment[:, :, None] == segment[:, None])
    # A token that the mask leaves out has the position of the previous token.
    position = mates.sum(-1, dtype=jnp.int32) - 1 + jnp.where(segment == 0, following[:, None], 0)
    before, last = following - 1, position[:, -1]
    read, enter, write, through = _maps(tokens, segment)

    number = jnp.arange(count, dtype=jnp.int32)
    inside = _is_level(level(position[:, :, None], position[:, None]), count, scales.dtype)
    entered = jnp.maximum(number[None, None], level(position, before[:, None])[..., None])
    entered = _is_level(entered, count, scales.dtype)
    read = read * jnp.einsum("bihm,bijm->bihj", scales, inside)
    out = jnp.einsum("bihj,bjhv->bihv", read, tokens.v)
    by_level = jnp.einsum("bihk,blhkv->bihlv", enter, levels)
    out = out + jnp.einsum("bihl,bihlv->bihv", jnp.einsum("bihm,bilm->bihl", scales, entered), by_level)

    merged = merge(levels, level(last, before))
    # Full precision: levels go through this product in every chunk, and rounding would add up.
    merged = jnp.einsum("bhkc,blhcv->blhkv", through, merged, precision=jax.lax.Precision.HIGHEST)
    written = jnp.einsum("bjm,bjhv->bjmhv", inside[:, -1], tokens.v)
    return out, LevelState(merged + jnp.einsum("bhkj,bjmhv->bmhkv", write, written), last + 1)


def _is_level(levels: Int[Array, "..."], count: int, dtype: Any) -> Float[Array, "... L"]:
    """1 at each of the given levels, else 0; levels beyond the topmost count as the topmost one."""
    return jax.nn.one_hot(jnp.minimum(levels, count - 1), count, dtype=dtype)


def _maps(tokens: RecurrenceInputs, segments: Int[Array, "B C"]) -> tuple[Array, Array, Array, Array]:
    """Compute a chunk's effect on any values v [C, V] and entering state S [K, V] of a head: four matrices.

    Outputs are read v + enter S, the new state is write v + through S. They are computed by running the
    recurrence on identity values and states, so that decay, erasing and segments are written once.
    Returns read [B, C, H, C], enter [B, C, H, K], write [B, H, K, C] and through [B, H, K, K].
    """
    b, size, h, k = tokens.k.shape
    dtype = tokens.v.dtype
    values = jnp.eye(size, size + k, dtype=dtype)[None, :, None]
    start = jnp.eye(k, size + k, size, dtype=dtype)[None, None]
    named = tokens._replace(v=jnp.broadcast_to(values, (b, size, h, size + k)))
    out, end = chunked(named, jnp.broadcast_to(start, (b, h, k, size + k)), segments, chunk=size)
    return out[..., :size], out[..., size:], end[..., :size], end[..., size:]
