"""Sampling: how the next token is drawn from logits."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.base.checks import finite_number, whole_number

# Values of `Settings.kind`: the likeliest token, a given one, one drawn from all, or from a filtered set.
GREEDY, GIVEN, DRAWN, FILTERED = range(4)
# The `top_k` of samplers without one.
EVERY = 2**31 - 1


class Settings(NamedTuple):
    """A sampler's numbers as arrays; unset ones get a value that filters nothing."""

    kind: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the next token: greedy at temperature 0, else from softmax(logits / temperature).

    A token must pass all given filters.

    Args:
        temperature: 0 takes the likeliest token.
        top_k: keeps the k likeliest tokens.
        top_p: keeps the smallest set of tokens with probability >= p (arXiv:1904.09751).
        min_p: keeps tokens at least min_p times as likely as the likeliest (arXiv:2407.01082).

    Raises:
        InputError: for values out of range.

    >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]]))
    >>> Sampler(1.0, min_p=0.25)._filtered(logits).argmin(), Sampler()(logits, jax.random.key(0)[None])[0]
    (Array(2, dtype=int32), Array([0], dtype=int32))
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        finite_number("temperature", self.temperature, 0.0)
        if self.top_k is not None:
            whole_number("top_k", self.top_k, 1, "tokens to draw from")
        if self.top_p is not None:
            finite_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            finite_number("min_p", self.min_p, 0.0, 1.0)

    @property
    def settings(self) -> Settings:
        """The sampler's numbers as arrays, for programs that serve all samplers."""
        some = (self.top_k, self.top_p, self.min_p) != (None,) * 3
        kind = GREEDY if self.temperature == 0 else FILTERED if some else DRAWN
        return Settings(
            np.int32(kind),
            np.float32(self.temperature),
            np.int32(min(self.top_k or EVERY, EVERY)),
            np.float32(np.inf if self.top_p is None else self.top_p),
            np.float32(self.min_p or 0.0),
        )

    def __call__(
        self, logits: Float[Array, "B V"], keys: Array, changed: Float[Array, "B V"] | None = None
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        """Draw a token per row; return the tokens and their log-probabilities under the model.

        keys: one per row. changed: logits to draw from instead; log-probabilities are of `logits` anyway.
        """
        token = chosen(self.settings, logits if changed is None else changed, keys)
        return token, logprob_of(logits, token)

    def _filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return filtered(self.settings, logits)


def chosen(
    how: Settings, logits: Float[Array, "B V"], keys: Array, given: Int[Array, "B"] | None = None
) -> Int[Array, "B"]:
    """Choose the next token of every row, or `given` if the settings say so; one key per row."""

    def greedy(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
        source = jax.lax.cond(how.kind == FILTERED, partial(filtered, how), partial(scaled, how), logits)
        return jax.vmap(jax.random.categorical)(keys, source).astype(jnp.int32)

    branches = [greedy, greedy if given is None else lambda _: given, drawn]
    return jax.lax.switch(jnp.minimum(how.kind, DRAWN), branches, logits)


def scaled(how: Settings, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Compute (logits - their maximum) / temperature, which does not overflow at a temperature near 0."""
    wide = logits.astype(jnp.float32)
    largest = wide.max(-1, keepdims=True)
    # A temperature that float32 rounds to 0 would divide by 0.
    temperature = jnp.maximum(how.temperature, jnp.finfo(jnp.float32).tiny)
    return jnp.where(wide == largest, 0.0, (wide - largest) / temperature)


def filtered(how: Settings, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Scale logits as `scaled` does, and set those of the tokens that are not drawn from to -inf."""
    whole = scaled(how, logits)
    order = jnp.argsort(-whole, axis=-1, stable=True)
    ranked = jnp.take_along_axis(whole, order, axis=-1)
    p = jax.nn.softmax(ranked)
    keep = jnp.arange(ranked.shape[-1], dtype=jnp.int32)[None] < how.top_k
    keep &= jnp.cumsum(p, -1) - p < how.top_p
    keep &= p >= how.min_p * p[..., :1]
    ranked = jnp.where(keep, ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)


def logprob_of(logits: Float[Array, "B V"], token: Int[Array, "B"]) -> Float[Array, "B"]:
    """Compute the log-probability of one token per row."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
