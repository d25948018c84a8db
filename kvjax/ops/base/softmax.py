"""Masked softmax, with the logarithm of its normaliser, which merging needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def softmax(
    scores: Float[Array, "*b S"], visible: Bool[Array, "*#b S"]
) -> tuple[Float[Array, "*b S"], Float[Array, "*b"]]:
    """Return (probabilities, log of their normaliser) over visible entries; 0 and -inf if there are none.

    >>> p, lse = softmax(jnp.zeros((2, 4)), jnp.asarray([[True, False, True, False], [False] * 4]))
    >>> p.tolist(), lse.round(3).tolist()
    ([[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], [0.6930000185966492, -inf])
    """
    top = jnp.where(visible, scores, -jnp.inf).max(-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top)).astype(scores.dtype)
    # Invisible scores may be large and must not reach exp, or the gradient is 0 times infinity.
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - top, 0.0)), 0.0).astype(scores.dtype)
    total = weights.sum(-1, keepdims=True)
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total).astype(scores.dtype)
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(safe))[..., 0]
    return weights / safe, lse
