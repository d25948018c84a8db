"""HGRN: a recurrence without keys or heads, in which every channel is a gated sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_starts
from kvjax.ops.recurrent.linear_attention import Mask

Channels = Float[Array, "B T D"]
ChannelState = Float[Array, "B D"]


def hgrn(
    x: Channels,
    g: Channels,
    *,
    initial_state: ChannelState | None = None,
    segments: Int[Array, "B T"] | None = None,
    mask: Mask = None,
    recurrent: bool = False,
) -> tuple[Channels, ChannelState]:
    """Run h = e^g h + x with log decays g <= 0: (every h, the last one) in promote(float32, input).

    HGRN (Qin et al., 2023, arXiv:2311.04823). A layer gives e^g = lb + (1 - lb) sigmoid(f), x = (1 - e^g) c.
    The paper's h is complex and is also rotated by an angle per channel; this one is real. There is no query,
    so no scale either.

    A parallel prefix sum of (e^g, x), which only multiplies decays, so nothing overflows; token by token with
    `recurrent`. It starts from initial_state (zeros if None), and from zeros again wherever `segments`
    changes. Tokens that mask leaves out do not change h.

    >>> x = jnp.ones((1, 3, 1))
    >>> hgrn(x, jnp.log(0.5) * x)[0][0, :, 0].tolist()
    [1.0, 1.5, 1.75]
    """
    dtype = wide(x)
    x, g = x.astype(dtype), g.astype(dtype)
    if mask is not None:
        x, g = (jnp.where(mask[..., None], y, jnp.zeros((), dtype)) for y in (x, g))
    a = jnp.exp(g)
    if segments is not None:
        starts = segment_starts(segments, x.shape[:2])
        a = jnp.where(starts[..., None], jnp.zeros((), dtype), a)
    before = jnp.zeros_like(x[:, 0]) if initial_state is None else initial_state.astype(dtype)
    if recurrent:

        def step(h: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            h = at[0] * h + at[1]
            return h, h

        last, h = jax.lax.scan(step, before, (jnp.moveaxis(a, 1, 0), jnp.moveaxis(x, 1, 0)))
        return jnp.moveaxis(h, 0, 1), last
    x = x.at[:, 0].add(a[:, 0] * before)
    _, h = jax.lax.associative_scan(lambda i, j: (i[0] * j[0], j[0] * i[1] + j[1]), (a, x), axis=1)
    return h, h[:, -1]
