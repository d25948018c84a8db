"""Reads the keys and values of texts, as codecs get them, to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.compress.select import ComputedTokens
from kvjax.grammar import Method
from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.steps import Run


class KeysAndValues(NamedTuple):
    """The keys and values of all tokens of all texts, concatenated."""

    k: Float[np.ndarray, "L K T H"]
    v: Float[np.ndarray, "L K T V"]


def read_keys_values(
    model: Model,
    batches: list[list[list[int]]],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    raw: bool = False,
) -> KeysAndValues:
    """Compute the keys and values of texts, in one pass over the texts. raw: keys before RoPE."""
    run, k, v = Run(model.config, Method()), [], []
    for rows in progress(batches):
        given = padded(model, rows, None)
        live = np.arange(given.tokens.shape[1])[None] < np.asarray(given.lengths)[:, None]
        read = _read(run, raw, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))
        for held, x in zip((k, v), read, strict=True):
            held.append(np.moveaxis(np.asarray(x, np.float32), 1, 2)[:, :, live])
    return KeysAndValues(np.concatenate(k, 2), np.concatenate(v, 2))


@partial(jax.jit, static_argnames=("run", "raw"))
def _read(
    run: Run, raw: bool, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "L B K T H"], Float[Array, "L B K T V"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({UnrotatedKeys()}))
    fresh = [f for f in prompt.fresh if isinstance(f, ComputedTokens)]
    keys = [f.observed[key_of(UnrotatedKeys())] if raw else f.k for f in fresh]
    values = [f.v for f in fresh]
    return jnp.concatenate(keys), jnp.concatenate(values)  # type: ignore[arg-type]
