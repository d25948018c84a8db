"""The short causal convolution in front of linear attentions, with the tail that decoding carries."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "W C"],
    bias: Float[Array, "C"] | None = None,
    *,
    tail: Float[Array, "B W C"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """Depthwise causal convolution y_t = sum_i w_i x_(t - W + 1 + i) + b; returns (y, new tail).

    The tail holds the last W inputs, zeros before the first: one more than the next token needs, so that a
    token that `mask` leaves out can still be answered, with what the last real one gave. Tokens left out must
    come last (right padding); they enter no tail.

    >>> y, tail = short_conv(jnp.ones((1, 3, 1)), jnp.ones((2, 1)))
    >>> y[0, :, 0].tolist(), tail[0, :, 0].tolist()
    ([1.0, 2.0, 2.0], [1.0, 1.0])
    """
    (b, t, c), w = x.shape, weight.shape[0]
    before = jnp.zeros((b, w, c), x.dtype) if tail is None else tail.astype(x.dtype)
    count = jnp.full((b,), t, jnp.int32) if mask is None else mask.sum(1, dtype=jnp.int32)
    line = jnp.concatenate([before, x], 1)
    y = sum((weight[i][None, None] * line[:, i : i + t + 1] for i in range(w)), jnp.zeros((), x.dtype))
    if bias is not None:
        y = y + bias[None, None]
    # y[:, s] is the answer after s new tokens.
    seen = jnp.minimum(jnp.arange(1, t + 1, dtype=jnp.int32)[None], count[:, None])
    last = count[:, None] + jnp.arange(w, dtype=jnp.int32)[None]
    return (
        jnp.take_along_axis(y, seen[..., None], axis=1),
        jnp.take_along_axis(line, last[..., None], axis=1),
    )
