"""Local linear attention: a weighted regression per query, of the values on the keys it attends to.

With p = softmax(scale q.k), the regression of v on k with weights p, a ridge and a free intercept gives at q

    o = E_p[v] - Cov_p(v, k) r,   r = (Cov_p(k, k) + ridge I)^-1 (E_p[k] - q)

Local Linear Attention solves for the probe r, Parallax learns it. Both are attention: their state is the
cache of keys and values, and a decode step is a call with one query, its `q_pos`, and the slots' `k_pos`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.attention.union import visible
from kvjax.ops.base.chunks import TokenChunk, scan_chunks
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_numbers
from kvjax.ops.base.solve import cholesky_solve, conjugate_gradient

# Queries per strip: weights of one strip exist at a time, [B, H, STRIP, S].
STRIP = 128


def local_linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N V"],
    *,
    ridge: float | Float[Array, ""],
    iterations: int | None = None,
    **where: Any,
) -> Float[Array, "B T H V"]:
    """Local Linear Attention (Zuo et al., 2025, arXiv:2510.01450), in a centred form.

    The paper's sum_j p_j (1 - z_j.rho) v_j / (1 - mu.rho), with z_j = k_j - q, mu = E_p[z] and rho = (E_p[z
    z'] + ridge I)^-1 mu, equals the o of this module: centring avoids the division. `ridge` > 0 is relative
    to weights that sum to one, as in the authors' code; a large one gives softmax attention. Without
    `iterations` the [K, K] systems are solved by Cholesky, one query of all rows and heads at a time. With
    them they are solved by that many conjugate gradient steps, each as costly as attention.

    `where` are `scale`, `q_pos`, `k_pos`, `window`, `segments`, `mask` and `strip` of `parallax`.

    >>> x = jnp.asarray([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1)
    >>> o = local_linear_attention(4 * x, x, 3 * x, ridge=1e-6, scale=0.0)  # a line, and queries beyond it
    >>> o[0, 1:, 0, 0].round(1).tolist()
    [12.0, 24.0]
    """
    if isinstance(ridge, (int, float)) and ridge <= 0:
        raise ValueError(f"ridge must be > 0, because few keys do not determine a slope; got {ridge}")
    ridge = jnp.asarray(ridge, _dtype(v))
    if iterations is None:
        return _strips(partial(_exact, ridge=ridge), (q,), k, v, **where)
    return _strips(partial(_matrix_free, ridge=ridge, iterations=iterations), (q,), k, v, **where)


def parallax(
    q: Float[Array, "B T H K"],
    r: Float[Array, "B T H K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N V"],
    *,
    scale: float | None = None,
    q_pos: Int[Array, "B T"] | None = None,
    k_pos: Int[Array, "B #N S"] | None = None,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B S"] | None = None,
    strip: int = STRIP,
) -> Float[Array, "B T H V"]:
    """Parallax (Zuo et al., 2026, arXiv:2605.29157), algorithm 1: o = E_p[v] - Cov_p(v, k) r, r learned.

    p = softmax(scale q.k) over visible keys, scale K^-0.5 unless given; r.k is not scaled. H is a multiple of
    N. A key is visible if `kvjax.ops.attention.union.visible` says so: `q_pos` and `k_pos` are positions,
    -1 for empty slots, whose contents must be finite; without them the T queries are the last of the S keys.
    `mask` leaves keys out. `segments` separates packed sequences where queries and keys are the same tokens;
    over a cache, empty slots do that. A query that sees nothing gives zeros. There is no other state than k
    and v, and one token is computed like many. It works in strips of `strip` queries.

    Raises ValueError for segments of other than T = S tokens.

    >>> x = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1)
    >>> parallax(0 * x, jnp.full_like(x, -2.0), x, x)[0, :, 0, 0].tolist()  # 1/2 + 2 Var(x)
    [0.0, 1.0]
    """
    return _strips(
        lambda p, k, q, r: r,
        (q, r),
        k,
        v,
        scale=scale,
        q_pos=q_pos,
        k_pos=k_pos,
        window=window,
        segments=segments,
        mask=mask,
        strip=strip,
    )


def _dtype(v: Array) -> Any:
    return wide(v)


def _strips(
    probe: Callable[..., Array],
    queries: tuple[Array, ...],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N V"],
    *,
    scale: float | None = None,
    q_pos: Int[Array, "B T"] | None = None,
    k_pos: Int[Array, "B #N S"] | None = None,
    window: int | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B S"] | None = None,
    strip: int = STRIP,
) -> Float[Array, "B T H V"]:
    """E_p[v] - Cov_p(v, k) r with r = probe(p, k, *queries), strip by strip; queries[0] is q."""
    dtype = _dtype(v)
    k, v, *queries = (x.astype(dtype) for x in (k, v, *queries))  # type: ignore[assignment]
    (b, t, h, width), (_, s, n, _) = queries[0].shape, k.shape
    if segments is not None and t != s:
        raise ValueError(f"segments need queries and keys of the same tokens, got {t} queries and {s} keys")
    scale = width**-0.5 if scale is None else scale
    if q_pos is None:
        q_pos = jnp.broadcast_to(jnp.arange(s - t, s, dtype=jnp.int32)[None], (b, t))
    if k_pos is None:
        k_pos = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None, None], (b, 1, s))
    if mask is not None:
        k_pos = jnp.where(mask[:, None], k_pos, -1)
    number = segment_numbers(segments, (b, t))

    # The gradient recomputes the weights, or it would store all of them, [T, S].
    @jax.checkpoint
    def body(state: tuple[()], chunk: TokenChunk) -> tuple[tuple[()], Array]:
        pos, of, *queries = chunk.tokens
        q, *rest = (x.reshape(b, -1, n, h // n, width) for x in queries)
        seen = visible(pos, k_pos, window)
        if segments is not None:
            seen = seen & (of[:, None, :, None] == number[:, None, None])
        scores = jnp.einsum("btngk,bsnk->bngts", q, k) * jnp.asarray(scale, dtype)
        seen = jnp.broadcast_to(seen[:, :, None], scores.shape)
        p = jax.nn.softmax(scores, where=seen)
        weights = p - p * _centred(p, k, probe(p, k, q, *rest))
        out = jnp.einsum("bngts,bsnv->btngv", weights, v)
        return state, out.reshape(b, -1, h, v.shape[-1])

    return scan_chunks(body, (), (q_pos, number, *queries), size=min(strip, t))[1]


def _centred(
    p: Float[Array, "B N G T S"], k: Float[Array, "B S N K"], r: Float[Array, "B T N G K"]
) -> Float[Array, "B N G T S"]:
    """r.k - E_p[r.k], where p sums to one."""
    c = jnp.einsum("btngk,bsnk->bngts", r, k)
    return c - (p * c).sum(-1, keepdims=True)


def _exact(
    p: Float[Array, "B N G T S"],
    k: Float[Array, "B S N K"],
    q: Float[Array, "B T N G K"],
    *,
    ridge: Float[Array, ""],
) -> Float[Array, "B T N G K"]:
    """(Cov_p(k, k) + ridge I)^-1 (E_p[k] - q), with the matrices of one query at a time."""
    diagonal = ridge * jnp.eye(k.shape[-1], dtype=k.dtype)

    @jax.checkpoint
    def one(at: tuple[Array, Array]) -> Array:
        p, q = at
        mean = jnp.einsum("bngs,bsnk->bngk", p, k)
        apart = k[:, :, :, None] - mean[:, None]
        weighted = apart * jnp.moveaxis(p, 3, 1)[..., None]
        cov = jnp.einsum("bsngk,bsngj->bngkj", weighted, apart)
        return cholesky_solve(cov + diagonal[None, None, None], mean - q)

    return jnp.moveaxis(jax.lax.map(one, (jnp.moveaxis(p, 3, 0), jnp.moveaxis(q, 1, 0))), 0, 1)


def _matrix_free(
    p: Float[Array, "B N G T S"],
    k: Float[Array, "B S N K"],
    q: Float[Array, "B T N G K"],
    *,
    ridge: Float[Array, ""],
    iterations: int,
) -> Float[Array, "B T N G K"]:
    """Compute the probe of `_exact` by conjugate gradients: Cov_p(k, k) x = E_p[k (k.x - E_p[k.x])]."""

    def matvec(x: Array) -> Array:
        return ridge * x + jnp.einsum("bngts,bsnk->btngk", p * _centred(p, k, x), k)

    mean = jnp.einsum("bngts,bsnk->btngk", p, k)
    return conjugate_gradient(matvec, mean - q, iterations)
