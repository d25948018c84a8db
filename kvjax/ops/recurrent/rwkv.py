"""The matrix-valued states of RWKV-6 and RWKV-7, as calls of the one recurrence.

Both take [B, T, H, ...] and return (o [B, T, H, V], final state [B, H, K, V]) in promote(float32, input). The
rest of a layer (token shifts, low-rank projections, norms, gates, the bonus that RWKV-7 adds to its output
and its values of the first layer) is not here. By keyword, both take

* initial_state, segments, recurrent: as in `linear_attention.run`;
* mask: tokens that it leaves out (padding) change no state;
* scale: the factor on o, 1 as in the papers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_starts
from kvjax.ops.recurrent.linear_attention import Mask, MatrixState, Output, PerChannel, Values, run
from kvjax.ops.recurrent.recurrence import tokens_of, zero_state

# RWKV-7's log decays are this times a sigmoid.
LEAST_LOG_DECAY = -math.exp(-0.5)


def rwkv6(
    r: PerChannel,
    k: PerChannel,
    v: Values,
    w_pre: PerChannel,
    u: Float[Array, "H K"],
    *,
    initial_state: MatrixState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float = 1.0,
) -> Output:
    """Run o = scale (S + Diag(u) k v')' r, then S = Diag(e^-e^w_pre) S + k v': read before decay and write.

    RWKV-6 "Finch" (Peng et al., 2024, arXiv:2404.05892); with a constant w_pre it is RWKV-5 "Eagle" of the
    same paper. The bonus u weights the current token, which the state does not hold yet. w_pre beyond 5
    counts as 5: both forget everything.

    >>> one = jnp.ones((1, 3, 1, 1))
    >>> rwkv6(one, one, one, jnp.log(jnp.log(2.0)) * one, jnp.full((1, 1), 10.0))[0].ravel().round(4).tolist()
    [10.0, 11.0, 11.5]
    """
    dtype = wide(v)
    r, k, v, w_pre, u = (x.astype(dtype) for x in (r, k, v, w_pre, u))
    # e^-e^5 is below 1e-64. Without the limit the decays of a chunk would sum to infinity.
    g = -jnp.exp(jnp.minimum(w_pre, 5.0))
    tokens = tokens_of(r, k, v, g, scale=scale, mask=mask)
    state = zero_state(tokens) if initial_state is None else initial_state.astype(dtype)
    # A token reads the state that its predecessor left: queries are shifted by one token.
    ahead = tokens._replace(q=jnp.roll(tokens.q, -1, axis=1))
    left, last = run(ahead, state, segments, recurrent)
    first = jnp.einsum("bhk,bhkv->bhv", tokens.q[:, 0], state)
    read = jnp.concatenate([first[:, None], left[:, :-1]], 1)
    if segments is not None:
        starts = segment_starts(segments, k.shape[:2])
        read = jnp.where(starts[..., None, None], jnp.zeros((), dtype), read)
    bonus = jnp.einsum("bthk,hk,bthk->bth", tokens.q, u, tokens.k)
    return read + bonus[..., None] * tokens.v, last


def rwkv7(
    r: PerChannel,
    k: PerChannel,
    v: Values,
    w_pre: PerChannel,
    kk: PerChannel,
    a: PerChannel,
    *,
    initial_state: MatrixState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float = 1.0,
) -> Output:
    """S = (Diag(e^w) - (a * kk) kk') S + k v', o = scale S' r, with w = -e^-0.5 sigmoid(w_pre).

    RWKV-7 "Goose" (Peng et al., 2025, arXiv:2503.14456). kk is the removal key, of unit length; a in (0, 1)
    the in-context learning rate; k the replacement key.

    What is erased is read from the state before it decays, which equals reading the decayed state with kk
    e^-w: safe, because w is never below -0.607. It is subtracted along a * kk, while v is written along
    another key.

    >>> x = jnp.full((1, 1, 1, 1), 0.5)
    >>> state = jnp.full((1, 1, 1, 1), 8.0)
    >>> _, state = rwkv7(x, x, x, jnp.full_like(x, -99.0), jnp.ones_like(x), x, initial_state=state)
    >>> state.item()  # 8 - 0.5 * 8 + 0.5 * 0.5
    4.25
    """
    dtype = wide(v)
    r, k, v, w_pre, kk, a = (x.astype(dtype) for x in (r, k, v, w_pre, kk, a))
    w = LEAST_LOG_DECAY * jax.nn.sigmoid(w_pre)
    tokens = tokens_of(r, k, v, w, erase=kk * jnp.exp(-w), removal=a * kk, scale=scale, mask=mask)
    return run(tokens, initial_state, segments, recurrent, least=LEAST_LOG_DECAY)
