"""Trains the free parameters of a conversion on the original's predictions over some texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.transformer import forward
from kvjax.train.losses import distilled

Choice = TypeVar("Choice")
TokenRows = Sequence[Sequence[int]]
# Texts of one step.
ROWS = 2


def learn(
    start: Choice,
    build: Callable[[Choice, Array], Params],
    made: Config,
    original: tuple[Params, Config],
    texts: TokenRows,
    steps: int,
    *,
    rate: float = 1e-2,
    extra: Callable[[Choice, Float[Array, ""]], Array] | None = None,
) -> Choice:
    """`start` after Adam on the mean KL(original || build(choice, key)) of the tokens of some texts.

    build: parameters of `made`; its key differs in every step. extra: added to the divergence, a function of
    the
    choice and of the share of steps that are done. Adam's eps is 1e-4, so that negligible gradients move
    nothing.
    Raises ValueError if there are no texts.
    """
    if not texts:
        raise ValueError("it learns from texts: give some")
    params, config = original
    tokens, lengths = padded(texts)
    real = (jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.float32)
    rule = optax.adam(optax.cosine_decay_schedule(rate, max(steps, 1)), eps=1e-4)

    def loss(choice: Choice, number: Int[Array, ""]) -> Float[Array, ""]:
        at = (number * ROWS + jnp.arange(ROWS, dtype=jnp.int32)) % len(tokens)
        mine = forward(build(choice, jax.random.key(number)), tokens[at], made)
        weights = jnp.pad(real[at], ((0, 0), (1, 0)))
        apart = distilled(mine, forward(params, tokens[at], config), weights) / weights.sum()
        return apart if extra is None else apart + extra(choice, number.astype(jnp.float32) / steps)

    def step(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, None]:
        choice, state = carry
        gradient = jax.grad(loss)(choice, number)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            change, state = rule.update(gradient, state, choice)
        return (jax.tree.map(jnp.add, choice, change), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps, dtype=jnp.int32))[0])
    return run((start, rule.init(start)))[0]  # pyright: ignore[reportArgumentType]


def padded(texts: TokenRows) -> tuple[Int[Array, "B T"], Int[Array, "B"]]:
    """Texts as rows padded to one length, and the number of tokens of each."""
    rows = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows), jnp.asarray([len(text) for text in texts], jnp.int32)
