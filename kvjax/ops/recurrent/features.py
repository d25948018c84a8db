"""Feature maps for linear attention: phi(q)' phi(k) instead of exp(q' k), so that the state is small.

Performer's random features are exponentials, which could overflow, so they are computed as slots with
running averages. Based's polynomial cannot overflow: it uses `normalised`, which takes any map with positive
products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dtypes import wide
from kvjax.ops.recurrent.recurrence import CHUNK_VECTOR, chunked, scan, tokens_of
from kvjax.ops.recurrent.slot_memory import LogSum, averaged, carry, empty_sum, read


class RandomSums(NamedTuple):
    """The state of Performer, for each of M features: the weighted mean value, and the sum of weights."""

    v: Float[Array, "B H M V"]
    weight: LogSum


def normalised(
    phi_q: Float[Array, "B T N D"],
    phi_k: Float[Array, "B T N D"],
    v: Float[Array, "B T H V"],
    *,
    epsilon: float,
    initial_state: Float[Array, "B H D W"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H D W"]]:
    """phi(q)' S / (phi(q)' z + epsilon) with S += phi(k) v', z += phi(k) (arXiv:2006.16236, eq. 16-20).

    z is carried as one more value channel of ones, so states are [B, H, D, V + 1]. H is a multiple of N:
    query and key heads serve groups of value heads.

    >>> phi, v = jnp.ones((1, 3, 1, 2)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> normalised(phi, phi, v, epsilon=0.0)[0][0, :, 0, 0].tolist()
    [0.0, 0.5, 1.0]
    """
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    tokens = tokens_of(phi_q, phi_k, jnp.concatenate([v, ones], -1), scale=1.0, mask=mask)
    out, state = (scan if recurrent else chunked)(tokens, initial_state, segments)
    return out[..., :-1] / (out[..., -1:] + epsilon), state


# --- Based ---------------------------------------------------------------------------------------------


def taylor_features(x: Float[Array, "*s K"]) -> Float[Array, "*s D"]:
    """phi(x)' phi(y) = 1 + x'y + (x'y)^2 / 2, the second-order Taylor polynomial of exp(x'y).

    D = 1 + K + K (K + 1) / 2: products x_i x_j and x_j x_i share one channel, while the full square has K^2
    of them.

    >>> x, y = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.25])
    >>> float(taylor_features(x) @ taylor_features(y))  # 1 + 1 + 1 / 2
    2.5
    """
    i, j = jnp.triu_indices(x.shape[-1])
    pairs = jnp.where(i == j, 0.5, 1.0).astype(x.dtype) ** 0.5
    ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
    square = x[..., i] * x[..., j] * pairs.reshape((1,) * (x.ndim - 1) + (-1,))
    return jnp.concatenate([ones, x, square], -1)


def based_attention(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T H V"],
    *,
    epsilon: float = 1e-6,
    scale: float | None = None,
    **how: Any,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H D W"]]:
    """Based's linear attention (Arora et al., 2024, arXiv:2402.18668): 1 + s + s^2 / 2 with s = scale q'k.

    These weights are at least 1/2, so the normaliser never vanishes; epsilon is added to it as in the library
    flash-linear-attention. scale: K^-0.5 unless given; other arguments, and the state, are those of
    `normalised`. The paper's short sliding-window attention is another layer.

    >>> x = jnp.ones((1, 2, 1, 3))
    >>> o, state = based_attention(x, x, x)
    >>> o.shape, state.shape
    ((1, 2, 1, 3), (1, 1, 10, 4))
    """
    phi_q, phi_k = (taylor_features(x) for x in _scaled(q, k, v, scale))
    return normalised(phi_q, phi_k, v.astype(phi_q.dtype), epsilon=epsilon, **how)


def _scaled(q: Array, k: Array, v: Array, scale: float | None) -> tuple[Array, Array]:
    """Cast q and k to the state's dtype, and multiplies each by the root of the scale."""
    dtype = wide(v)
    root = jnp.asarray((q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5, dtype)
    return q.astype(dtype) * root, k.astype(dtype) * root


# --- Performer -----------------------------------------------------------------------------------------


def orthogonal_projection(
    key: PRNGKeyArray, features: int, dim: int, dtype: Any = jnp.float32
) -> Float[Array, "M K"]:
    """Gaussian rows [features, dim], orthogonal to each other in blocks of `dim` rows (arXiv:2009.14794).

    A block is a random rotation whose rows get the lengths of independent Gaussian vectors, so every row is
    N(0, I) and estimates stay unbiased, with less variance than independent rows. The last block is cut when
    dim does not divide features.

    >>> w = orthogonal_projection(jax.random.key(0), 6, 4)
    >>> w.shape, bool(abs(w[:4] @ w[:4].T - jnp.diag((w[:4] ** 2).sum(1))).max() < 1e-5)
    ((6, 4), True)
    """
    turn, length = jax.random.split(key)
    blocks = jax.random.orthogonal(turn, dim, (-(-features // dim),), dtype)
    norms = jnp.linalg.norm(jax.random.normal(length, (features, dim), dtype), axis=-1, keepdims=True)
    return blocks.reshape(-1, dim)[:features] * norms


def log_positive_features(x: Float[Array, "*s K"], projection: Float[Array, "M K"]) -> Float[Array, "*s M"]:
    """Logarithms of FAVOR+'s features, w_m'x - |x|^2 / 2 - log(M) / 2 (arXiv:2009.14794, positive features).

    With w_m ~ N(0, I), exp of them has E[phi(x)' phi(y)] = exp(x'y).

    >>> log_positive_features(jnp.zeros((2, 3)), jnp.ones((1, 3))).tolist()
    [[0.0], [0.0]]
    """
    half = 0.5 * jnp.square(x).sum(-1, keepdims=True)
    products = jnp.einsum("...k,mk->...m", x, projection.astype(x.dtype))
    return products - half - 0.5 * jnp.log(jnp.asarray(projection.shape[0], x.dtype))


def performer_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    projection: Float[Array, "M K"],
    *,
    initial_state: RandomSums | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H V"], RandomSums]:
    """Attend as Performer (Choromanski et al., 2020, arXiv:2009.14794): softmax by random features, causal.

        o_t = sum_{j <= t} phi(q_t)'phi(k_j) v_j / sum_{j <= t} phi(q_t)'phi(k_j)

    phi are FAVOR+'s positive features of q and k, each times the root of scale (K^-0.5 unless given). With
    a_jm = log phi_m(k_j), b_tm = log phi_m(q_t) and L_tm = log sum_{j <= t} exp(a_jm) the same is

        o_t = sum_m softmax_m(b_t + L_t) vbar_tm,    vbar_tm = sum_{j <= t} exp(a_jm - L_tm) v_j

    so each feature is a slot with an average value. Subtracted from the exponents are the largest a_jm *so
    far* of each feature, and at each query the largest b_tm + L_tm; both cancel exactly. Public code
    subtracts the largest exponent of all keys of the sequence. That costs less, but in a causal model one
    large future key makes earlier weights underflow, a decoder cannot know it in advance, and the constant
    that must then be added against 0 / 0 biases the weights. Here nothing is added, and decode steps give the
    result of the whole sequence; the price is a comparison per feature, as in GLA. Before a row's first token
    o is 0.

    >>> x, w = jnp.ones((1, 2, 1, 4)), orthogonal_projection(jax.random.key(0), 8, 4)
    >>> o, state = performer_attention(x, x, x, w)
    >>> o.shape, state.v.shape, state.weight.top.shape
    ((1, 2, 1, 4), (1, 1, 8, 4), (1, 1, 8))
    """
    q, k = _scaled(q, k, v, scale)
    a, b, v = log_positive_features(k, projection), log_positive_features(q, projection), v.astype(k.dtype)
    if mask is not None:
        a, v = (jnp.where(mask[..., None, None], x, 0.0) for x in (a, v))
    if initial_state is None:
        means = jnp.zeros((a.shape[0], *a.shape[2:], v.shape[-1]), v.dtype)
        state = RandomSums(means, empty_sum(a))
    else:
        state = jax.tree.map(lambda x: x.astype(v.dtype), initial_state)

    def body(state: RandomSums, chunk: TokenChunk) -> tuple[RandomSums, Array]:
        a, b, v = chunk.tokens
        shares, sums = averaged(a, chunk, state.weight)
        some = sums.total > 0
        reach = jnp.where(some, sums.top, 0.0) + jnp.log(jnp.where(some, sums.total, 1.0))
        out = read(jax.nn.softmax(b + reach), shares, v, state.v)
        return RandomSums(carry(shares, v, state.v), jax.tree.map(lambda x: x[:, -1], sums)), out

    size = 1 if recurrent else CHUNK_VECTOR  # a chunk of one token is the recurrence itself
    state, out = scan_chunks(body, state, (a, b, v), size=size, segments=segments, mask=mask)
    return out, state
