"""Spans: runs of tokens of unequal length, known by where they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The position of a span that there is not.
FAR = 2**30


def each_list(f: Callable[..., Any], lead: int, *xs: Array) -> Any:
    """F over the `lead` first axes of all arguments."""
    for _ in range(lead):
        f = jax.vmap(f)
    return f(*xs)


def in_order(pos: Int[Array, "S"], *xs: Array) -> tuple[Array, ...]:
    """Positions, ascending with FAR for empty slots, and numbers of the slots in the same order."""
    order = jnp.argsort(jnp.where(pos < 0, FAR, pos), stable=True)
    return jnp.where(pos < 0, FAR, pos)[order], *(x[order] for x in xs)


def numbered(begins: Bool[Array, "S"], live: Bool[Array, "S"], count: int) -> Int[Array, "S"]:
    """Return the number of each slot's span, of slots in order; `count` for empty slots.

    If more than `count` spans begin, as many neighbours are joined as make them `count` at most.

    >>> begins, live = jnp.asarray([0, 0, 1, 1, 1, 0]) > 0, jnp.arange(6) < 5
    >>> numbered(begins, live, 4).tolist(), numbered(begins, live, 2).tolist()
    ([0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2])
    """
    begins = (begins & live).at[0].set(live[0])
    rank = jnp.cumsum(begins, dtype=jnp.int32) - 1
    together = jnp.maximum(-(-begins.sum(dtype=jnp.int32) // count), 1)
    return jnp.where(live, rank // together, count)


def summed_up(
    number: Int[Array, "S"], pos: Int[Array, "S"], k: Float[Array, "S H"], counts: Bool[Array, "S"],
    count: int,
) -> tuple[Int[Array, "C"], Float[Array, "C H"]]:  # fmt: skip
    """Find where `count` spans begin (FAR for missing ones), and the mean of the keys in each that count."""
    weight = counts.astype(k.dtype)
    starts = jnp.full(count + 1, FAR, jnp.int32).at[number].min(pos)
    total = jnp.zeros((count + 1, k.shape[-1]), k.dtype).at[number].add(jnp.where(counts[:, None], k, 0))
    many = jnp.zeros(count + 1, k.dtype).at[number].add(weight)
    return starts[:count], (total / jnp.maximum(many, 1)[:, None])[:count]


def span_of(starts: Int[Array, "B K C"], pos: Int[Array, "B K S"]) -> Int[Array, "B K S"]:
    """Return the number of each slot's span; tokens after the last one belong to it."""
    found = each_list(lambda s, p: jnp.searchsorted(s, p, side="right"), 2, starts, pos)
    return jnp.maximum(found.astype(jnp.int32) - 1, 0)
