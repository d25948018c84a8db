"""Operations of the prefill kernels on one tile of scores and its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .plan import Sizes

LANES = 128
NEG_INF = float("-inf")
LOG2E = 1.4426950408889634
NT, NN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))


def column(row: Any) -> Any:
    """[1, n] transposed to [n, 128], with equal lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def lanes(x: Any, count: int) -> Any:
    """Widen a `column` to `count` lanes."""
    return x[:, :count] if count <= LANES else jnp.tile(x, (1, -(-count // LANES)))[:, :count]


def only_real(x: Any, pos: Any) -> Any:
    """Zeros the rows of x whose `pos` is below 0: they may hold NaN, and zero times NaN is NaN."""
    live = lanes(pos, x.shape[1]) >= 0
    return jnp.where(live, x.astype(jnp.float32), 0.0).astype(x.dtype)


def rows_of(ref: Any) -> list[Any]:
    """Take the rows [1, n] of a block [1, C, n]."""
    return [ref[0, n : n + 1] for n in range(ref.shape[1])]


def visible(asked: list[Any], pos: list[Any], window: int | None) -> Any:
    """Which slots of a tile are visible, by positions and perhaps segments of both, as rows or columns.

    Queries below 0 see nothing, and slots below 0 are invisible.
    """
    low = jnp.zeros_like(asked[0]) if window is None else jnp.maximum(asked[0] - (window - 1), 0)
    seen = (pos[0] >= low) & (pos[0] <= asked[0])
    return seen & (asked[1] == pos[1]) if len(asked) == 2 else seen


def matrix_dtype(x: Any) -> Any:
    """Choose the dtype of products with queries `x`."""
    return jnp.float32 if x.dtype == jnp.float32 else jnp.bfloat16


def dot(x: Any, y: Any, dims: Any) -> Any:
    """Multiply operands in `matrix_dtype` to a product in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32, precision=precision)


def chunks(heads: int, tokens: int, rows: int) -> Iterator[tuple[int, slice]]:
    """Pieces of a tile that are processed at once: (query head of the group, at most `rows` tokens)."""
    for g in range(heads):
        for start in range(0, tokens, rows):
            yield g, slice(start, min(start + rows, tokens))


def logits(s: Any, sizes: Any) -> Any:
    """Logits in base 2 of products s, so that exp2 is the softmax's exponential; sizes: scale and softcap."""
    if sizes.softcap is None:
        return s * (sizes.scale * LOG2E)
    return jnp.tanh(s * (sizes.scale / sizes.softcap)) * (sizes.softcap * LOG2E)


def slope(z: Any, sizes: Sizes) -> Any:
    """Compute d(logit) / d(scale s) at base-2 logits z: 1 - tanh^2 with a soft-cap; None if 1."""
    if sizes.softcap is None:
        return None
    tanh = z * (1 / (sizes.softcap * LOG2E))
    return 1.0 - tanh * tanh


def folded(r: Any, g: int, rows: slice, z: Any, v: Any, *, whole: bool) -> None:
    """Add logits z in base 2 and values v to the running maximum, total and sum of values of some rows.

    r: references `top`, `total` and `acc` [G, T, lanes]. whole: every row sees something, in this call or an
    earlier one. Totals are sums per lane, which are reduced once, at the end.
    """
    old = r.top[g, rows]
    top = jnp.maximum(old, z.max(-1, keepdims=True))
    safe = top if whole else jnp.where(top == NEG_INF, 0.0, top)
    p, fade = jnp.exp2(z - lanes(safe, z.shape[1])), jnp.exp2(old - safe)
    r.top[g, rows] = top
    sums = sum(p[:, n : n + LANES] for n in range(0, p.shape[1], LANES))
    r.total[g, rows] = r.total[g, rows] * fade + sums
    r.acc[g, rows] = r.acc[g, rows] * lanes(fade, v.shape[1]) + dot(p.astype(v.dtype), v, NN)


def in_turn(
    parts: list[tuple[int, slice]],
    score: Callable[[int, slice], Any],
    fold: Callable[[int, slice, Any], None],
) -> None:
    """Fold the scores of all parts; the product for the next one is issued before the last one's softmax."""
    s = score(*parts[0])
    for n, part in enumerate(parts):
        ahead = score(*parts[n + 1]) if n + 1 < len(parts) else None
        fold(*part, s)
        s = ahead
