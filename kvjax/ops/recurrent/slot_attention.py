"""Slot attention: tokens are added to M slots, and queries attend to the slots.

    Kt = Kt Diag(e^g) + k s'      keys of the slots,   [K, M]
    Vt = Diag(e^g) Vt + s v'      values of the slots, [M, V]
    o  = Vt' softmax(scale Kt' q)

GSA takes s and g; ABC's slots are running averages, for which both follow from one score. The first product
decays along the channels that it returns, while `kvjax.ops.recurrent.recurrence` decays along those that it
sums over. Here both products of a chunk share their decays (`kvjax.ops.recurrent.slot_memory`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dtypes import wide
from kvjax.ops.recurrent.recurrence import CHUNK_VECTOR
from kvjax.ops.recurrent.slot_memory import (
    LogSum,
    SlotWeights,
    averaged,
    carry,
    empty_sum,
    gated,
    match,
    read,
)

AnyState = TypeVar("AnyState")


class GSAState(NamedTuple):
    """Keys and values of the slots: the state of GSA."""

    k: Float[Array, "B H K M"]
    v: Float[Array, "B H M V"]


class Averages(NamedTuple):
    """The state of ABC: averages, and the sum of exp(s) in each, which is needed to add a token."""

    k: Float[Array, "B H K M"]
    v: Float[Array, "B H M V"]
    weight: LogSum


def gsa(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    s: Float[Array, "B T H M"],
    g: Float[Array, "B T H M"],
    *,
    initial_state: GSAState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], GSAState]:
    """Gated Slot Attention (Zhang et al., 2024, arXiv:2409.07146): slots that forget, read by a softmax.

    s: how much a token writes into each slot; g <= 0: natural-log decay of each slot. The paper's layer has
    s = 1 - e^g and g = logsigmoid(f) / 8; both are arguments here. scale: K^-0.5 unless given.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> o, state = gsa(x, x, x, x, jnp.zeros((1, 3, 1, 2)))
    >>> o.shape, state.k.shape, o[0, :, 0, 0].tolist()  # nothing decays, so values add up
    ((1, 3, 1, 2), (1, 1, 2, 2), [1.0, 2.0, 3.0])
    """
    tokens = _prepared({"q": q, "k": k, "v": v, "s": s, "g": g}, scale, mask)
    state = GSAState(*_empty(tokens)) if initial_state is None else _cast(initial_state, tokens)

    def body(state: GSAState, chunk: TokenChunk) -> tuple[GSAState, Array]:
        shares = gated(chunk.tokens["s"], chunk.tokens["g"], chunk)
        out, k, v = _attend(chunk.tokens, shares, state.k, state.v)
        return GSAState(k, v), out

    size = 1 if recurrent else CHUNK_VECTOR  # a chunk of one token is the recurrence itself
    state, out = scan_chunks(body, state, tokens, size=size, segments=segments, mask=mask)
    return out, state


def abc(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    s: Float[Array, "B T H M"],
    *,
    initial_state: Averages | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], Averages]:
    """ABC (Peng et al., 2021, arXiv:2110.02488): slots are averages of all tokens, weighted by exp(s).

    With L_t = log sum_{j <= t} exp(s_j) this is GSA with decay L_{t-1} - L_t and write factor exp(s_t - L_t).
    Scores may be of any size: only differences to the largest so far matter. The averages run up to t,
    as in the library flash-linear-attention. scale: K^-0.5 unless given. Before a row's first token o is 0.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> o, state = abc(x, x, x, 1000 * x)
    >>> o[0, :, 0, 0].tolist(), state.weight.top.tolist(), state.weight.total.tolist()
    ([1.0, 1.0, 1.0], [[[1000.0, 1000.0]]], [[[3.0, 3.0]]])
    """
    tokens = _prepared({"q": q, "k": k, "v": v, "s": s}, scale, mask)
    empty = Averages(*_empty(tokens), empty_sum(tokens["s"]))
    state = empty if initial_state is None else _cast(initial_state, tokens)

    def body(state: Averages, chunk: TokenChunk) -> tuple[Averages, Array]:
        shares, sums = averaged(chunk.tokens["s"], chunk, state.weight)
        out, k, v = _attend(chunk.tokens, shares, state.k, state.v)
        return Averages(k, v, jax.tree.map(lambda x: x[:, -1], sums)), out

    size = 1 if recurrent else CHUNK_VECTOR  # a chunk of one token is the recurrence itself
    state, out = scan_chunks(body, state, tokens, size=size, segments=segments, mask=mask)
    return out, state


def _prepared(tokens: dict[str, Array], scale: float | None, mask: Array | None) -> dict[str, Array]:
    """Prepare the arguments in the state's dtype, with the query scaled, and zeros for tokens left out."""
    dtype = wide(tokens["v"])
    tokens = {n: x.astype(dtype) for n, x in tokens.items()}
    width = tokens["q"].shape[-1]
    tokens["q"] *= jnp.asarray(width**-0.5 if scale is None else scale, dtype)
    if mask is None:
        return tokens
    return {n: jnp.where(mask[..., None, None], x, jnp.zeros((), dtype)) for n, x in tokens.items()}


def _cast(state: AnyState, tokens: dict[str, Array]) -> AnyState:
    return jax.tree.map(lambda x: x.astype(tokens["v"].dtype), state)


def _empty(tokens: dict[str, Array]) -> tuple[Array, Array]:
    b, _, h, m = tokens["s"].shape
    k, v = tokens["k"], tokens["v"]
    return jnp.zeros((b, h, k.shape[-1], m), k.dtype), jnp.zeros((b, h, m, v.shape[-1]), v.dtype)


def _attend(
    tokens: dict[str, Array], shares: SlotWeights, k: Float[Array, "B H K M"], v: Float[Array, "B H M V"]
) -> tuple[Float[Array, "B C H V"], Float[Array, "B H K M"], Float[Array, "B H M V"]]:
    """Return (output, new keys of the slots, new values of the slots)."""
    keys = jnp.swapaxes(k, 2, 3)
    p = jax.nn.softmax(match(tokens["q"], shares, tokens["k"], keys))
    out = read(p, shares, tokens["v"], v)
    return out, jnp.swapaxes(carry(shares, tokens["k"], keys), 2, 3), carry(shares, tokens["v"], v)
