"""Transformer-VQ: attention over quantised keys, so that old tokens are counts and mean values per code."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, arrange, refill, scan_chunks
from kvjax.ops.base.dtypes import wide


class VQState(NamedTuple):
    """The state of a sequence: counts and means of old blocks by code, and the newest one or two blocks.

    counts, means: how many old tokens have each of the C codes, and their mean value.
    codes, values: tokens of the previous and the current block, `length` of the 2 * block slots in use.
    """

    counts: Int[Array, "B H C"]
    means: Float[Array, "B H C V"]
    codes: Int[Array, "B W H"]
    values: Float[Array, "B W H V"]
    length: Int[Array, "B"]


def quantise(
    k: Float[Array, "B T H K"], codebook: Float[Array, "H C K"]
) -> tuple[Int[Array, "B T H"], Float[Array, "B T H K"]]:
    """Return (codes, the codes' vectors): the nearest code of every key, in its head's codebook.

    The gradient of the vectors passes straight through to k (van den Oord et al., 2017, arXiv:1711.00937,
    section 3.2); the codebook gets none, since the paper learns it by moving averages of its keys.

    >>> codes, _ = quantise(jnp.asarray([[[[0.9]], [[-2.0]]]]), jnp.asarray([[[1.0], [-1.0]]]))
    >>> codes.tolist()
    [[[0], [1]]]
    """
    dtype = wide(k)
    k, codebook = k.astype(dtype), jax.lax.stop_gradient(codebook.astype(dtype))
    closeness = jnp.einsum("bthk,hck->bthc", k, codebook) - (codebook**2).sum(-1)[None, None] / 2
    codes = jnp.argmax(closeness, -1).astype(jnp.int32)
    # k - k is exactly zero, so the vectors are exactly those of the codebook.
    return codes, _vectors(codes, codebook) + (k - jax.lax.stop_gradient(k))


def _vectors(codes: Int[Array, "B T H"], codebook: Float[Array, "H C K"]) -> Float[Array, "B T H K"]:
    return jax.vmap(lambda book, code: book[code], (0, 2), 2)(codebook, codes)


def transformer_vq(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    codebook: Float[Array, "H C K"],
    *,
    block: int,
    initial_state: VQState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], VQState]:
    """Transformer-VQ (Lingle, 2023, arXiv:2309.16354): softmax attention in linear time.

    With c(k) the code nearest to k, out = softmax([s q.c(k_j), s q.c + log n_c]) [v_j; mu_c] over the tokens
    j of the previous and the current block of `block` tokens, and over the codes c of older tokens, n_c of
    them with mean value mu_c. That is attention over all quantised keys. scale s: K^-0.5 unless given.

    Gradients pass straight through the code to k while the token is in the two newest blocks, and not later.
    A state keeps codes only, so keys of an earlier call get no gradients. Differences from the paper: no
    relative position bias, and no norm of q and k, which the model applies.

    Raises ValueError if the window of `initial_state` does not have 2 * block slots.

    >>> x, book = jnp.ones((1, 5, 1, 1)), jnp.ones((1, 1, 1))
    >>> o, state = transformer_vq(x, x, jnp.arange(5.0).reshape(x.shape), book, block=2)
    >>> o[0, :, 0, 0].tolist(), state.counts.tolist(), state.length.tolist()
    ([0.0, 0.5, 1.0, 1.5, 2.0], [[[2]]], [3])
    """
    dtype = wide(v)
    q, k, v, codebook = (x.astype(dtype) for x in (q, k, v, jax.lax.stop_gradient(codebook)))
    b, t, h, width = k.shape
    state = initial_state or _empty(b, h, codebook.shape[1], v.shape[-1], 2 * block, dtype)
    if state.values.shape[1] != 2 * block:
        raise ValueError(f"a state of blocks of {state.values.shape[1] // 2} tokens, but block={block}")
    state = VQState(*(x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in state))
    q = q * jnp.asarray(width**-0.5 if scale is None else scale, dtype)
    codes, k = quantise(k, codebook)
    body = partial(_one_chunk, codebook=codebook, block=block)
    start = (state, _vectors(state.codes, codebook))
    size = 1 if recurrent else min(block, t)
    (state, _), out = scan_chunks(body, start, (q, k, codes, v), size=size, segments=segments, mask=mask)
    return out, state


def _empty(b: int, h: int, codes: int, width: int, slots: int, dtype: jnp.dtype) -> VQState:
    return VQState(
        jnp.zeros((b, h, codes), jnp.int32),
        jnp.zeros((b, h, codes, width), dtype),
        jnp.zeros((b, slots, h), jnp.int32),
        jnp.zeros((b, slots, h, width), dtype),
        jnp.zeros((b,), jnp.int32),
    )


def _one_chunk(
    carry: tuple[VQState, Array], chunk: TokenChunk, *, codebook: Float[Array, "H C K"], block: int
) -> tuple[tuple[VQState, Array], Array]:
    """Read a chunk after the window; the carry also holds the window's vectors, for their gradients."""
    state, vectors = carry
    q, *new = chunk.tokens
    at = arrange(chunk, state.length, slots=2 * block, block=block)
    k, codes, v = (
        jnp.concatenate(pair, 1) for pair in zip((vectors, state.codes, state.values), new, strict=True)
    )
    # A token two blocks away counts as old: it is still in the window, but its key is only its code.
    near = at.block[:, -q.shape[1] :, None] - 1 <= at.block[:, None]
    exact = jnp.where(
        near[:, None],
        jnp.einsum("bihk,bjhk->bhij", q, k),
        jnp.einsum("bihk,bjhk->bhij", q, jax.lax.stop_gradient(k)),
    )
    used = state.counts > 0
    bias = jnp.log(jnp.where(used, state.counts, 1).astype(v.dtype))
    old = jnp.einsum("bihk,hck->bhic", q, codebook) + bias[:, :, None]
    seen = jnp.broadcast_to(at.seen[:, None], exact.shape)
    seen = jnp.concatenate([seen, at.carried[:, None, :, None] & used[:, :, None]], -1)
    p = jax.nn.softmax(jnp.concatenate([exact, old], -1), where=seen)
    entries = v.shape[1]
    out = jnp.einsum("bhij,bjhv->bihv", p[..., :entries], v)
    out = out + jnp.einsum("bhic,bhcv->bihv", p[..., entries:], state.means)

    kept = jnp.where(at.stays[:, None, None], state.counts, 0)
    counts, means = fold(kept, state.means, codes[:, :block], v[:, :block], at.leaves[:, :block])
    return (VQState(counts, means, refill(codes, at), refill(v, at), at.length), refill(k, at)), out


def fold(
    counts: Int[Array, "B H C"],
    means: Float[Array, "B H C V"],
    codes: Int[Array, "B L H"],
    v: Float[Array, "B L H V"],
    which: Bool[Array, "B L"],
) -> tuple[Int[Array, "B H C"], Float[Array, "B H C V"]]:
    """Add the tokens of `which` to counts and means. Means stay small, unlike sums."""
    new = jax.nn.one_hot(jnp.where(which[:, :, None], codes, -1), counts.shape[-1], dtype=v.dtype)
    total = counts + new.sum(1).astype(counts.dtype)
    share = 1 / jnp.maximum(total, 1).astype(v.dtype)
    kept = counts.astype(v.dtype) * share
    return total, means * kept[..., None] + jnp.einsum("blhc,blhv->bhcv", new, v) * share[..., None]
