"""Logit processors: functions of logits and of the tokens so far, applied before a token is drawn.

A processor is any `(logits [B, V], tokens [B, T]) -> logits [B, V]` that JAX can trace. tokens are the
prompt's followed by the generated ones, with -1 as padding. `kvjax.generate(processors=(...,))` applies them
in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.sampling import Sampler
from kvjax.base.errors import InputError

Processor = Callable[[Float[Array, "B V"], Int[Array, "B T"]], Float[Array, "B V"]]


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Makes tokens that came before less likely (arXiv:1909.05858).

    Args:
        penalty: the divisor of their positive logits and factor of negative ones; 1 changes nothing.

    Raises:
        ValueError: if penalty <= 0.

    >>> process((RepetitionPenalty(2.0),), jnp.array([[1.0, 2.0, -1.0]]), jnp.array([[1, 2, -1]])).tolist()
    [[1.0, 1.0, -2.0]]
    """

    penalty: float

    def __post_init__(self):
        if not 0 < self.penalty < float("inf"):
            raise ValueError(f"repetition penalty must be > 0 and finite, got {self.penalty}")

    def __call__(self, logits: Float[Array, "B V"], tokens: Int[Array, "B T"]) -> Float[Array, "B V"]:
        seen = counts(tokens, logits.shape[1]) > 0
        return jnp.where(seen, jnp.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


@dataclasses.dataclass(frozen=True)
class FrequencyPenalty:
    """Lowers every token's logit for each earlier occurrence.

    Args:
        penalty: subtracted per occurrence; negative values favour repetition.

    Raises:
        ValueError: if penalty is not a finite number.

    >>> process((FrequencyPenalty(0.5),), jnp.zeros((1, 3)), jnp.array([[1, 1, 2]])).tolist()
    [[0.0, -1.0, -0.5]]
    """

    penalty: float

    def __post_init__(self):
        if not abs(self.penalty) < float("inf"):
            raise ValueError(f"frequency penalty must be a finite number, got {self.penalty}")

    def __call__(self, logits: Float[Array, "B V"], tokens: Int[Array, "B T"]) -> Float[Array, "B V"]:
        return logits - self.penalty * counts(tokens, logits.shape[1])


def counts(tokens: Int[Array, "B T"], vocab: int) -> Float[Array, "B V"]:
    """How often each id of the vocabulary occurs in a row; -1 is not counted."""
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    at = jnp.where(tokens < 0, vocab, tokens)
    return jnp.zeros((tokens.shape[0], vocab)).at[row, at].add(1.0, mode="drop")


def process(
    processors: Sequence[Processor], logits: Float[Array, "B V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B V"]:
    """Compute the logits as float32 after every processor; InputError for another shape or for integers."""
    out = logits.astype(jnp.float32)
    for one in processors:
        new = one(out, tokens)
        if not isinstance(new, jax.Array | np.ndarray):
            raise InputError(f"the processor {one} returned {new!r}, expected logits, as it was given")
        if new.shape != out.shape or not jnp.issubdtype(new.dtype, jnp.floating):
            raise InputError(
                f"the processor {one} returned {new.dtype}{list(new.shape)}, expected "
                f"float32{list(out.shape)}: logits of every row and id, as it was given"
            )
        out = jnp.asarray(new, jnp.float32)
    return out


def history(tokens: Int[Array, "B T"], lengths: Int[Array, "B"], new: int) -> Int[Array, "B S"]:
    """Return the tokens of prompts with space for `new` more: -1 after each row's length."""
    here = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.pad(jnp.where(here, tokens, -1), ((0, 0), (0, new)), constant_values=-1)


def put(past: Int[Array, "B S"], token: Int[Array, "B"]) -> Int[Array, "B S"]:
    """Append one token per row after its last; -1 appends none."""
    row = jnp.arange(past.shape[0], dtype=jnp.int32)
    return past.at[row, (past >= 0).sum(-1, dtype=jnp.int32)].set(token, mode="drop")


@partial(jax.jit, static_argnames=("sampler", "processors"), donate_argnames=("past",))
def processed(
    sampler: Sampler,
    processors: tuple[Processor, ...],
    logits: Float[Array, "B V"],
    past: Int[Array, "B T"],
    keys: Array,
    at: Int[Array, ""],
    done: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Int[Array, "B T"], Bool[Array, "B"]]:
    """Token `at` of every row from processed logits, the tokens so far, and rows with `nothing_left`.

    keys: one PRNG key per row.
    """
    changed = process(processors, logits, past)
    token, _ = sampler(logits, jax.vmap(partial(jax.random.fold_in, data=at))(keys), changed)
    return token, put(past, jnp.where(done, -1, token)), nothing_left(changed) & ~done


def nothing_left(logits: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
    """Rows of logits without a likeliest token: they contain NaN, or are all -inf.

    >>> nothing_left(jnp.array([[0.0, -jnp.inf], [-jnp.inf, -jnp.inf], [0.0, jnp.nan]])).tolist()
    [False, True, True]
    """
    return jnp.isnan(logits).any(-1) | (logits.max(-1) == -jnp.inf)
