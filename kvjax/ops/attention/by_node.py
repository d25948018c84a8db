"""Attention over pieces of keys that rows share: each piece is read once for all rows that share it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# A function from Q queries [I, N, Q, H] of each of I pieces, in N heads, and their positions [I, Q] to
# (out [I, N, Q, H], lse [I, N, Q]).
OverPieces = Callable[[Array, Array], tuple[Array, Array]]


def attend_by_node(
    over: OverPieces, q: Float[Array, "R N 1 H"], q_pos: Int[Array, "R 1"], rows: Int[Array, "I Q"]
) -> Float[Array, "R N 1 H"]:
    """Attend from R rows to I pieces of keys: the Q rows `rows[i]` attend to piece i (-1: no row).

    DeFT (Yao et al., 2024, arXiv:2404.00242, section 3) and ChunkAttention (Ye et al., 2024,
    arXiv:2402.15220, section 3.2): the queries of all rows below a node of the tree attend to its keys side
    by side, so the keys are read once; partial results are merged by their logsumexp,

        out = sum_i exp(lse_i - m) out_i / sum_i exp(lse_i - m),  m = max_i lse_i.

    over: attention of every piece's queries over that piece, with lse -inf where a query sees nothing.
    A row without a piece gets 0.

    >>> def over(q, pos):  # every piece is one key, whose value is the number of the piece
    ...     out = jnp.broadcast_to(jnp.arange(3.0)[:, None, None, None], q.shape)
    ...     return out, jnp.zeros(q.shape[:3])
    >>> rows = jnp.asarray([[0, 1], [0, -1], [1, -1]])
    >>> out = attend_by_node(over, jnp.zeros((2, 1, 1, 1)), jnp.zeros((2, 1), jnp.int32), rows)
    >>> out[:, 0, 0, 0].tolist()
    [0.5, 1.0]
    """
    count = q.shape[0]
    there = rows >= 0
    of = jnp.where(there, rows, 0)
    asked = q[of, :, 0].swapaxes(1, 2)
    out, lse = over(asked, jnp.where(there, q_pos[of, 0], -1))
    # The axes of pieces and of their queries become one: lse [I * Q, N] of N heads.
    lse = lse.swapaxes(1, 2).reshape(-1, q.shape[1])
    out = out.swapaxes(1, 2).reshape(*lse.shape, -1)
    to = jnp.where(there, rows, count).reshape(-1)
    top = jax.ops.segment_max(lse, to, count + 1)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(lse - top[to])
    parts = jax.ops.segment_sum(weight[..., None] * out.astype(weight.dtype), to, count + 1)[:count]
    whole = jax.ops.segment_sum(weight, to, count + 1)[:count, :, None]
    found = parts / jnp.where(whole == 0, 1, whole)
    return found[:, :, None].astype(q.dtype)
