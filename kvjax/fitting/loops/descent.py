"""The training loop for arrays without a closed form: Adam, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

Arrays = dict[str, Array]


def descended(
    loss: Callable[[Arrays, Any, Any], Float[Array, ""]],
    arrays: Arrays,
    batches: Iterable[Any],
    fixed: PyTree,
    *,
    rate: float,
    steps: int = 1,
    within: Callable[[Arrays], Arrays] | None = None,
    rule: Callable[[float], optax.GradientTransformation] = optax.adam,
) -> dict[str, np.ndarray]:
    """Train arrays by Adam (arXiv:1412.6980) at learning rate `rate`, with `steps` steps on every batch.

    loss: (arrays, batch, fixed) -> the loss; fixed: other inputs of the loss, such as the parameters of a
    model. within: projects the arrays to their allowed range after every step. rule: learning rate -> the
    optimiser.
    """
    optimiser = rule(rate)

    @jax.jit
    def improved(arrays: Arrays, state: Any, batch: Any, fixed: PyTree) -> tuple[Arrays, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            updates, state = optimiser.update(jax.grad(loss)(arrays, batch, fixed), state, arrays)
        new: Any = optax.apply_updates(arrays, updates)
        return new if within is None else within(new), state

    state = optimiser.init(arrays)
    for batch in batches:
        for _ in range(steps):
            arrays, state = improved(arrays, state, batch, fixed)
    return {name: np.asarray(x) for name, x in arrays.items()}


def warmed_up(rate: float) -> optax.GradientTransformation:
    """Adam whose learning rate warms up to `rate` over 50 steps, with gradients clipped to a norm of 1."""
    grown = optax.warmup_constant_schedule(0.0, rate, 50)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(grown))


def uniform(key: Array, shape: tuple[int, ...], fan_in: int) -> Float[Array, "*_"]:
    """Compute the initial weights or biases of a linear map: uniform within 1 / sqrt(its inputs)."""
    most = fan_in**-0.5
    return jax.random.uniform(key, shape, minval=-most, maxval=most)
