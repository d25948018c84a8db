"""The last tokens that recurrent layers carry: a short convolution's inputs, a token shift."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_numbers, segment_starts


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "W C"],
    bias: Float[Array, "C"] | None = None,
    *,
    tail: Float[Array, "B W C"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """Depthwise causal convolution y_t = sum_i w_i x_(t - W + 1 + i) + b; returns (y, new tail).

    The tail holds the last W inputs, zeros before the first: one more than the next token needs, so that a
    token that `mask` leaves out still gets the output of the last real one. Tokens left out must come last
    (right padding); they do not enter the tail. Where `segments` changes, inputs before it count as zeros.

    >>> y, tail = short_conv(jnp.ones((1, 3, 1)), jnp.ones((2, 1)))
    >>> y[0, :, 0].tolist(), tail[0, :, 0].tolist()
    ([1.0, 2.0, 2.0], [1.0, 1.0])
    """
    (b, t, c), w = x.shape, weight.shape[0]
    before = jnp.zeros((b, w, c), x.dtype) if tail is None else tail.astype(x.dtype)
    count = jnp.full((b,), t, jnp.int32) if mask is None else mask.sum(1, dtype=jnp.int32)
    line = jnp.concatenate([before, x], 1)
    text = jnp.pad(segment_numbers(segments, (b, t)), ((0, 0), (w, 0)))

    def tap(i: int) -> Array:
        seen = line[:, i : i + t + 1]
        if segments is not None:
            same = text[:, i : i + t + 1] == text[:, w - 1 :]
            seen = jnp.where(same[..., None], seen, jnp.zeros((), x.dtype))
        return weight[i][None, None].astype(dtype) * seen.astype(dtype)

    # A single rounding at the end, as in the authors' kernels.
    dtype = wide(x)
    y = sum((tap(i) for i in range(w)), jnp.zeros((), dtype))
    if bias is not None:
        y = y + bias[None, None].astype(dtype)
    y = y.astype(x.dtype)
    # y[:, s] is the output after s new tokens.
    seen = jnp.minimum(jnp.arange(1, t + 1, dtype=jnp.int32)[None], count[:, None])
    last = count[:, None] + jnp.arange(w, dtype=jnp.int32)[None]
    return (
        jnp.take_along_axis(y, seen[..., None], axis=1),
        jnp.take_along_axis(line, last[..., None], axis=1),
    )


def token_shift(
    x: Float[Array, "B T C"],
    last: Float[Array, "B C"],
    mask: Bool[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B C"]]:
    """Return (the token before each token, the row's last one); `last` comes before the first.

    Tokens that `mask` leaves out must come last. Zeros come before the first token of a later segment.

    >>> x = jnp.asarray([[[1.0], [2.0], [3.0]]])
    >>> before, last = token_shift(x, jnp.zeros((1, 1)), jnp.asarray([[True, True, False]]))
    >>> before[0, :, 0].tolist(), last.item()
    ([0.0, 1.0, 2.0], 2.0)
    """
    line = jnp.concatenate([last[:, None].astype(x.dtype), x], 1)
    count = mask.sum(1, dtype=jnp.int32)
    before = line[:, :-1]
    if segments is not None:
        starts = segment_starts(segments, x.shape[:2])
        before = jnp.where(starts[..., None], jnp.zeros((), x.dtype), before)
    return before, jnp.take_along_axis(line, count[:, None, None], axis=1)[:, 0]


def answered(
    y: Float[Array, "B T C"], last: Float[Array, "B C"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T C"], Float[Array, "B C"]]:
    """(y with `last` where the mask leaves tokens out, y of the row's last real token, else `last`).

    For layers whose state no longer has the inputs of its last token, in case that token is read again.

    >>> y, last = answered(jnp.ones((1, 1, 1)), jnp.full((1, 1), 5.0), jnp.asarray([[False]]))
    >>> y.item(), last.item()
    (5.0, 5.0)
    """
    left = token_shift(y, last, mask)[1]
    return jnp.where(mask[..., None], y, last[:, None].astype(y.dtype)), left
