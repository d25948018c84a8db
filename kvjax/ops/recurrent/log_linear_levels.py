"""The levels of log-linear attention, one state per power of two of distance, and one token over them.

Log-Linear Attention (Guo et al., 2025, arXiv:2506.04761, section 3); `kvjax.ops.recurrent.log_linear` says
what levels are. A state has the levels that its last token saw.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState, advance, products, stacked


class LevelState(NamedTuple):
    """Memory of the tokens before position `next`, in the levels that the last of them saw.

    Rows may be at different positions. Levels are not merged for the token at `next` yet. For single tokens,
    levels may be those of one layer in a stack.
    """

    levels: Float[Array, "B L H K V"] | StackedState
    next: Int[Array, "B"]


def level(t: Int[Array, "..."], s: Int[Array, "..."]) -> Int[Array, "..."]:
    """Level on which a token at t sees one at s: 0 if s = t, else the number of bits of t xor s.

    >>> level(jnp.asarray([5, 5, 5, 8]), jnp.asarray([5, 4, 3, 7])).tolist()
    [0, 1, 3, 4]
    """
    apart = t ^ s
    return jnp.iinfo(apart.dtype).bits - jax.lax.clz(apart)


def levels_for(tokens: int) -> int:
    """How many levels separate `tokens` tokens as in the paper: ceil(log2 tokens) + 1.

    >>> [levels_for(n) for n in (1, 2, 3, 4, 5, 1024)]
    [1, 2, 3, 3, 4, 11]
    """
    return (max(tokens, 1) - 1).bit_length() + 1


def empty_levels(tokens: RecurrenceInputs, count: int) -> LevelState:
    """Make the state before the first token, with `count` levels."""
    b, _, h, k = tokens.k.shape
    levels = jnp.zeros((b, count, h, k, tokens.v.shape[-1]), tokens.v.dtype)
    return LevelState(levels, jnp.zeros((b,), jnp.int32))


def log_linear_step(
    state: LevelState,
    token: RecurrenceInputs,
    level_scales: Float[Array, "B H L"],
    mask: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B H V"], LevelState]:
    """One token per row, its arrays without the time axis: (output, new state), at any position of each row.

    Rows that `mask` leaves out keep their levels and position.

    >>> from kvjax.ops.recurrent.recurrence import tokens_of
    >>> tokens = tokens_of(*[jnp.ones((1, 3, 1, 1))] * 3)
    >>> state = empty_levels(tokens, 3)
    >>> for t in range(3):  # at position 2: itself on level 0, the two others on level 2
    ...     token = jax.tree.map(lambda x: x[:, t], tokens)
    ...     o, state = log_linear_step(state, token, jnp.asarray([[[1.0, 10.0, 100.0]]]))
    >>> o.tolist(), state.levels[0, :, 0, 0, 0].tolist(), state.next.tolist()
    ([[[201.0]]], [1.0, 0.0, 2.0], [3])
    """
    move, ahead = level(state.next, state.next - 1), jnp.ones_like(state.next)
    if mask is not None:
        token = without(token, mask)
        move, ahead = (jnp.where(mask, x, jnp.zeros_like(x)) for x in (move, ahead))
    stack = stacked(state.levels)
    levels = stack.own()
    rows, count = levels.shape[:2]

    def flat(x: Array) -> Array:
        return x.reshape(rows * count, *x.shape[2:])

    def by_level(x: Array) -> Array:
        return x.reshape(rows, count, *x.shape[1:])

    # Every level decays and is erased; only level 0 is written. Levels are rows of one batch, without a copy.
    each = jax.tree.map(lambda x: jnp.repeat(x[:, None], count, 1), token)
    each = jax.tree.map(flat, each._replace(v=each.v.at[:, 1:].set(0.0)))
    # Reading is linear: the output of merged levels is the sum of their outputs, so they need not be merged
    # first.
    found = merge(by_level(products(flat(levels), each)), move)
    out, levels = map(by_level, advance(flat(merge(levels, move)), each, flat(found)))
    out = jnp.einsum("bhl,blhv->bhv", level_scales.astype(out.dtype), out)
    return out, LevelState(stack.replaced(levels).like(state.levels), state.next + ahead)


def without(tokens: RecurrenceInputs, mask: Bool[Array, "..."]) -> RecurrenceInputs:
    """Change the tokens to decay, erase and write nothing where the mask leaves them out."""
    q, k, v, g, p = tokens[:5]
    real = mask[..., None, None]
    k, v, g = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (k, v, g))
    return RecurrenceInputs(q, k, v, g, None if p is None else jnp.where(real, p, jnp.zeros((), p.dtype)))


def merge(levels: Float[Array, "B L H _ V"], move: Int[Array, "B"]) -> Float[Array, "B L H _ V"]:
    """Merge levels 0..move of every row, or something linear in them, into level `move` or the topmost one.

    It uses sums, because a matrix product may round its factors.
    """
    number = jnp.arange(levels.shape[1], dtype=jnp.int32)[None]
    target = jnp.minimum(move, levels.shape[1] - 1)[:, None]
    low, there = (x[..., None, None, None] for x in (number <= target, number == target))
    zero = jnp.zeros((), levels.dtype)
    merged = jnp.where(low, levels, zero).sum(1, keepdims=True)
    return jnp.where(there, merged, jnp.where(low, zero, levels))
