"""Packed sequences: where one segment ends and the next begins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segment_starts(segments: Int[Array, "B T"] | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    """Whether a token of `shape` [B, T] opens a segment: `segments` changes there.

    A row's first token continues its past.

    >>> segment_starts(jnp.asarray([[4, 4, 7]]), (1, 3)).tolist()
    [[False, False, True]]
    """
    starts = jnp.zeros(shape, bool)
    return starts if segments is None else starts.at[:, 1:].set(segments[:, 1:] != segments[:, :-1])


def segment_numbers(segments: Int[Array, "B T"] | None, shape: tuple[int, ...]) -> Int[Array, "B T"]:
    """How often `segments` has changed up to each token of a row; 0 everywhere without segments.

    >>> segment_numbers(jnp.asarray([[4, 4, 7]]), (1, 3)).tolist()
    [[0, 0, 1]]
    """
    return jnp.cumsum(segment_starts(segments, shape), 1, dtype=jnp.int32)


def segment_offsets(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many tokens of its segment come before each token of a row.

    >>> segment_offsets(jnp.asarray([[7, 7, 7, 4, 4]])).tolist()
    [[0, 1, 2, 0, 1]]
    """
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    starts = segment_starts(segments, segments.shape)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
