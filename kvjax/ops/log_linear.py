"""Log-linear attention: a linear attention whose memory is one state per power of two of distance.

Log-Linear Attention (Guo, Yang, Goel, Xing, Dao, Kim, 2025, arXiv:2506.04761, section 3), over every member
of the recurrence of `kvjax.ops.recurrence`, with or without erasing, with decays of heads or of channels:

    A_r = (I - k_r p_r') Diag(exp g_r)
    o_t = scale sum_{s <= t} lambda_t[level(t, s)] (q_t' A_t A_{t-1} ... A_{s+1} k_s) v_s

level(t, s) is 0 for t = s, else the number of bits of t xor s, positions counting from 0. Tokens on one level
stay together on one level for every later token, so that each level is one state [K, V].

* Before token t, all levels below m = level(t, t - 1) become level m. A state has the levels that its last
  token saw, before this is done for the next. Level l >= 1 holds 2^(l - 1) tokens if bit l - 1 of the last
  token's position is set, else none.
* What has level l at token u is on level max(l, level(t, u)) at every t >= u. (Let m = level(t, u): t has bit
  m - 1 and u has not, while u has bit l - 1 and the tokens of level l have not; u agrees with all in the bits
  above. The higher of the two bits decides, and they differ.) So chunks may begin anywhere: what entered a
  chunk is read on that level, and moves to it at the chunk's end.
* All levels share A, hence merging is exact, and one linear map of a chunk serves all of them. Level weights
  multiply after the erasing: [tril(Q K') X * decay * lambda] V, X the inverse of the chunk's erasing.

n tokens need ceil(log2 n) + 1 levels (`levels_for`). With L fewer, everything further away is on the topmost
level, which keeps absorbing: min(level, L - 1). L = 1 is the plain member times lambda.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.packing import segment_starts
from kvjax.ops.recurrence import CHUNK_SCALAR, CHUNK_VECTOR, Tokens, chunked, step, tokens_of


class LevelState(NamedTuple):
    """Memory of the tokens before position `next`, in the levels that the last of them saw.

    Rows may be at different positions. Nothing was merged for the token at `next` yet.
    """

    levels: Float[Array, "B L H K V"]
    next: Int[Array, "B"]


Output = tuple[Float[Array, "B T H V"], LevelState]


def level(t: Int[Array, "..."], s: Int[Array, "..."]) -> Int[Array, "..."]:
    """Level on which a token at t sees one at s: 0 if s = t, else the number of bits of t xor s.

    >>> level(jnp.asarray([5, 5, 5, 8]), jnp.asarray([5, 4, 3, 7])).tolist()
    [0, 1, 3, 4]
    """
    apart = t ^ s
    return jnp.iinfo(apart.dtype).bits - jax.lax.clz(apart)


def levels_for(tokens: int) -> int:
    """Levels that keep `tokens` tokens apart as the paper does: ceil(log2 tokens) + 1.

    >>> [levels_for(n) for n in (1, 2, 3, 4, 5, 1024)]
    [1, 2, 3, 3, 4, 11]
    """
    return (max(tokens, 1) - 1).bit_length() + 1


def empty_levels(tokens: Tokens, count: int) -> LevelState:
    """The state before the first token, with `count` levels."""
    b, _, h, k = tokens.k.shape
    levels = jnp.zeros((b, count, h, k, tokens.v.shape[-1]), tokens.v.dtype)
    return LevelState(levels, jnp.zeros((b,), jnp.int32))


def log_linear_step(
    state: LevelState,
    token: Tokens,
    level_scales: Float[Array, "B H L"],
    mask: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B H V"], LevelState]:
    """One token per row, its arrays without the time axis: (output, new state), at any position of each row.

    Rows that `mask` leaves out keep their levels and position.

    >>> tokens = tokens_of(*[jnp.ones((1, 3, 1, 1))] * 3)
    >>> state = empty_levels(tokens, 3)
    >>> for t in range(3):  # at position 2: itself on level 0, the two others on level 2
    ...     token = jax.tree.map(lambda x: x[:, t], tokens)
    ...     o, state = log_linear_step(state, token, jnp.asarray([[[1.0, 10.0, 100.0]]]))
    >>> o.tolist(), state.levels[0, :, 0, 0, 0].tolist(), state.next.tolist()
    ([[[201.0]]], [1.0, 0.0, 2.0], [3])
    """
    move, ahead = level(state.next, state.next - 1), jnp.ones_like(state.next)
    if mask is not None:
        token = without(token, mask)
        move, ahead = (jnp.where(mask, x, jnp.zeros_like(x)) for x in (move, ahead))
    levels = _merge(state.levels, move)
    # Every level decays and is erased; only level 0 is written.
    v = jnp.pad(token.v[:, None], [(0, 0), (0, levels.shape[1] - 1), (0, 0), (0, 0)])
    out, levels = jax.vmap(lambda s, x: step(s, token._replace(v=x)), 1, 1)(levels, v)
    out = jnp.einsum("bhl,blhv->bhv", level_scales.astype(out.dtype), out)
    return out, LevelState(levels, state.next + ahead)


def log_linear(
    tokens: Tokens,
    level_scales: Float[Array, "B T H L"],
    state: LevelState | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    mask: Bool[Array, "B T"] | None = None,
    chunk: int | None = None,
    recurrent: bool = False,
) -> Output:
    """The member of the recurrence that `tokens` feed, log-linear: in chunks, or token by token.

    Where `segments` changes, positions start again at 0 with empty levels; the first token continues `state`.
    Tokens that `mask` leaves out have no position and change no level, wherever they are; their outputs read
    the state as it is. ValueError if the state has other levels than level_scales, or if a call without
    segments and mask has more tokens than its levels hold apart. Where positions are data (in decoding, or
    with a mask) nothing is raised, and the topmost level absorbs what is further away.

    >>> ones = jnp.ones((1, 3, 1, 1))
    >>> o, state = log_linear(tokens_of(ones, ones, ones), jnp.asarray([[[[1.0, 10.0, 100.0]]] * 3]))
    >>> o[0, :, 0, 0].tolist(), state.levels[0, :, 0, 0, 0].tolist(), state.next.tolist()
    ([1.0, 11.0, 201.0], [1.0, 0.0, 2.0], [3])
    """
    b, t = tokens.k.shape[:2]
    count, dtype = level_scales.shape[-1], tokens.v.dtype
    if state is None:
        state = empty_levels(tokens, count)
    elif state.levels.shape[1] != count:
        raise ValueError(
            f"the state has {state.levels.shape[1]} levels and level_scales {count}: give both as many"
        )
    if segments is None and mask is None and levels_for(t) > count:
        raise ValueError(
            f"{count} levels hold {2 ** (count - 1)} tokens apart, got {t} tokens: give level_scales "
            f"{levels_for(t)} levels, or a mask of ones if the topmost level is to hold all the others"
        )
    state = LevelState(state.levels.astype(dtype), state.next.astype(jnp.int32))
    real = jnp.ones((b, t), bool) if mask is None else mask
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
) -> Output:
    """Log-linear Mamba-2 and GLA: o_t = sum_s lambda_t[level(t, s)] exp(G_t - G_s) (q_t' k_s) v_s.

    Log decays g are [B, T, H] as in the paper's Mamba-2 (dt and the skip are the caller's), [B, T, H, K] or
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
) -> Output:
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


def without(tokens: Tokens, mask: Bool[Array, "..."]) -> Tokens:
    """Tokens that decay, erase and write nothing where the mask leaves them out."""
    q, k, v, g, p = tokens
    real = mask[..., None, None]
    k, v, g = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (k, v, g))
    return Tokens(q, k, v, g, None if p is None else jnp.where(real, p, jnp.zeros((), p.dtype)))


def _merge(levels: Float[Array, "B L H K V"], move: Int[Array, "B"]) -> Float[Array, "B L H K V"]:
    """Levels 0..move of every row become its level `move`, or the topmost one.

    Sums and no matrix product, which may round its factors.
    """
    number = jnp.arange(levels.shape[1], dtype=jnp.int32)[None]
    target = jnp.minimum(move, levels.shape[1] - 1)[:, None]
    low, there = (x[..., None, None, None] for x in (number <= target, number == target))
    zero = jnp.zeros((), levels.dtype)
    merged = jnp.where(low, levels, zero).sum(1, keepdims=True)
    return jnp.where(there, merged, jnp.where(low, zero, levels))


def _restart(state: LevelState, fresh: Bool[Array, "B"]) -> LevelState:
    """The empty state in the rows where a segment begins."""
    levels = jnp.where(fresh[:, None, None, None, None], jnp.zeros((), state.levels.dtype), state.levels)
    return LevelState(levels, jnp.where(fresh, 0, state.next))


def _token_by_token(state: LevelState, fed: tuple[Tokens, Array, Array, Array]) -> Output:
    def body(s: LevelState, at: tuple[Tokens, Array, Array, Array]) -> tuple[LevelState, Array]:
        token, scales, fresh, real = at
        out, s = log_linear_step(_restart(s, fresh), token, scales, real)
        return s, out

    state, out = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), fed))
    return jnp.moveaxis(out, 0, 1), state


def _in_chunks(state: LevelState, fed: tuple[Tokens, Array, Array, Array], size: int) -> Output:
    b, t = fed[-1].shape
    count = -(-t // size)

    def cut(x: Array) -> Array:
        # Zeros are tokens that the mask leaves out.
        padded = jnp.pad(x, [(0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    def body(s: LevelState, at: tuple[Tokens, Array, Array, Array]) -> tuple[LevelState, Array]:
        out, s = _one_chunk(s, *at)
        return s, out

    state, out = jax.lax.scan(body, state, jax.tree.map(cut, fed))
    return jnp.moveaxis(out, 0, 1).reshape(b, count * size, *out.shape[3:])[:, :t], state


def _one_chunk(
    state: LevelState,
    tokens: Tokens,
    scales: Float[Array, "B C H L"],
    fresh: Bool[Array, "B C"],
    real: Bool[Array, "B C"],
) -> tuple[Float[Array, "B C H V"], LevelState]:
    """One chunk from any positions: sums over its own tokens j, and over the levels l that entered it."""
    levels, following = _restart(state, fresh[:, 0])
    tokens = without(tokens, real)
    size, count = real.shape[1], levels.shape[1]
    until = jnp.tril(jnp.ones((1, size, size), bool))
    segment = (until & fresh[:, None]).sum(-1, dtype=jnp.int32)
    mates = until & real[:, None] & (segment[:, :, None] == segment[:, None])
    # The position of a token left out is that of the one before it.
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

    merged = _merge(levels, level(last, before))
    # Where matrix products round their factors, chunk after chunk would wear the levels down.
    merged = jnp.einsum("bhkc,blhcv->blhkv", through, merged, precision=jax.lax.Precision.HIGHEST)
    written = jnp.einsum("bjm,bjhv->bjmhv", inside[:, -1], tokens.v)
    return out, LevelState(merged + jnp.einsum("bhkj,bjmhv->bmhkv", write, written), last + 1)


def _is_level(levels: Int[Array, "..."], count: int, dtype: Any) -> Float[Array, "... L"]:
    """1 at each of the given levels, else 0; those beyond the topmost one are on it."""
    return jax.nn.one_hot(jnp.minimum(levels, count - 1), count, dtype=dtype)


def _maps(tokens: Tokens, segments: Int[Array, "B C"]) -> tuple[Array, Array, Array, Array]:
    """What a chunk does to any values v [C, V] and entering state S [K, V] of a head, as four matrices.

    Outputs are read v + enter S, the new state is write v + through S. They are what the recurrence makes of
    values and states that are the columns of an identity, so decay, erasing and segments are written once.
    Returns read [B, C, H, C], enter [B, C, H, K], write [B, H, K, C] and through [B, H, K, K].
    """
    b, size, h, k = tokens.k.shape
    dtype = tokens.v.dtype
    values = jnp.eye(size, size + k, dtype=dtype)[None, :, None]
    start = jnp.eye(k, size + k, size, dtype=dtype)[None, None]
    named = tokens._replace(v=jnp.broadcast_to(values, (b, size, h, size + k)))
    out, end = chunked(named, jnp.broadcast_to(start, (b, h, k, size + k)), segments, chunk=size)
    return out[..., :size], out[..., size:], end[..., :size], end[..., size:]
