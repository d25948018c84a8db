"""Sums of outer products per slot and head, 1/R sum_r a_r (x) b_r, and products with them.

`a` holds R factors over heads of every slot, [B, S, R, N], and `b` R factors over channels, [B, S, R, H].
Keys and values of tensor product attention have this form (Zhang et al., 2025, arXiv:2501.06425).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.base.dtypes import wide


def of_factors(a: Float[Array, "B S R N"], b: Float[Array, "B S R H"]) -> Float[Array, "B N S H"]:
    """Compute the vectors of all heads, in the factors' dtype.

    >>> of_factors(jnp.ones((1, 5, 2, 3)), jnp.ones((1, 5, 2, 8))).shape
    (1, 3, 5, 8)
    """
    # Not an einsum: XLA would compute these small matrix products one by one.
    heads, channels = jnp.moveaxis(a, (2, 3), (0, 2))[..., None], jnp.moveaxis(b, 2, 0)[:, :, None]
    total = jnp.zeros((), wide(a))
    for of_heads, of_channels in zip(heads, channels, strict=True):
        total = total + of_heads.astype(total.dtype) * of_channels.astype(total.dtype)
    return (total / a.shape[2]).astype(a.dtype)


def dot_factors(
    q: Float[Array, "B N T H"], a: Float[Array, "B S R N"], b: Float[Array, "B S R H"]
) -> Float[Array, "B N T S"]:
    """Products of every head's query with its vectors, in promote(float32, a): 1/R sum_r a_r (b_r q)."""
    total = jnp.zeros((), wide(a))
    # Rank by rank, XLA on CPUs multiplies twice as fast as with all ranks in one product.
    for r in range(a.shape[2]):
        met = jnp.einsum("bsh,bnth->bnts", b[:, :, r], q, preferred_element_type=total.dtype)
        total = total + jnp.swapaxes(a[:, :, r], 1, 2)[:, :, None].astype(met.dtype) * met
    return total / a.shape[2]


def sum_factors(
    p: Float[Array, "B N T S"], a: Float[Array, "B S R N"], b: Float[Array, "B S R H"]
) -> Float[Array, "B N T H"]:
    """Weighted sums of every head's vectors over slots, in promote(float32, a): 1/R sum_r (p a_r) b_r."""
    weights = a[..., None].astype(p.dtype) * jnp.moveaxis(p, 3, 1)[:, :, None]
    total = jnp.einsum("bsrnt,bsrh->bnth", weights.astype(b.dtype), b, preferred_element_type=wide(b))
    return total / a.shape[2]
