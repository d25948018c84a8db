"""Gated DeltaProduct: several delta steps per token, as a longer sequence of the one recurrence.

A token has n sub-steps. Its decay is in the first, its query in the last, and each has a key of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.base.dtypes import wide
from kvjax.ops.recurrent.linear_attention import Mask, Output, PerChannel, PerHead, gated_delta_rule
from kvjax.ops.recurrent.recurrence import substeps


def gated_delta_product(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S H V"],
    g: PerHead | PerChannel | None,
    beta: Float[Array, "B S H"],
    *,
    scale: float = 1.0,
    segments: Int[Array, "B T"] | None = None,
    mask: Mask = None,
    **how: Any,
) -> Output:
    """S = e^g S, then n times S = S + beta_j k_j (v_j - S' k_j)', then o = scale S' q.

    DeltaProduct (Siems et al., 2025, arXiv:2502.10297), gated; g is None in the variant without gates. k, v
    and beta hold S = T n sub-steps, those of a token side by side. Keys have unit length; beta up to 2 gives
    reflections, and two of them a rotation. There is no query scale (scale is 1). g may also be per key
    channel, which the paper does not have. initial_state and recurrent are those of `linear_attention.run`;
    segments and mask are per token, not per sub-step.

    Raises ValueError if S is no multiple of T.

    >>> e = jnp.eye(2)
    >>> k, v = e[None, :, None], jnp.asarray([3.0, 5.0])[None, :, None, None]  # one token writes at two keys
    >>> out, _ = gated_delta_product(jnp.ones((1, 1, 1, 2)), k, v, None, jnp.ones((1, 2, 1)))
    >>> out.item()
    8.0
    """
    n, rest = divmod(k.shape[1], q.shape[1])
    if rest or not n:
        raise ValueError(
            f"k, v and beta must have the same number of sub-steps for every token, got {k.shape[1]} for "
            f"{q.shape[1]} tokens: give them T * n along the second axis, the n of a token side by side"
        )
    dtype = wide(v)
    q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
    q = substeps(*[jnp.zeros_like(q)] * (n - 1), q)
    if g is not None:
        g = g.astype(dtype)
        g = substeps(g, *[jnp.zeros_like(g)] * (n - 1))
    segments, mask = (None if x is None else jnp.repeat(x, n, axis=1) for x in (segments, mask))
    out, state = gated_delta_rule(q, k, v, g, beta, scale=scale, mask=mask, segments=segments, **how)
    return out[:, n - 1 :: n], state
