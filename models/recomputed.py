"""Layers whose intermediate results the gradient computes again instead of storing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.ops.base.dispatch import platform

# A layer as a function of its carry (x, state) and its inputs, which returns a carry and what it leaves.
Turn = Callable[[Any, Any], tuple[Any, Any]]


def recomputed(turn: Turn) -> Turn:
    """`jax.checkpoint`, and inside a loop on CPUs.

    XLA for CPUs recognises what straight-line code computes a second time, and stores it after all; out of a
    loop it moves nothing. Loops of one turn are unrolled, so there is a second one, which does nothing.
    """
    if platform() != "cpu":
        return jax.checkpoint(turn)  # pyright: ignore[reportReturnType]

    @jax.checkpoint
    def once(x: Any, on: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
        def run(x: Any) -> tuple[Any, Any]:
            (x, after), left = turn((x, state), inputs)
            return x, (after, left)

        nothing = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(run, x)[1])
        return jax.lax.cond(on, run, lambda x: (x, nothing), x)

    def looped(carry: Any, inputs: Any) -> tuple[Any, Any]:
        x, state = carry
        x, found = jax.lax.scan(lambda x, on: once(x, on, state, inputs), x, np.array([True, False]))
        state, left = jax.tree.map(lambda y: y[0], found)
        return (x, state), left

    return looped
