"""Samples as rows of tokens, with the positions at which the model predicts the answers."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.api.prefill import padded
from kvjax.eval.tasks.sample import Sample
from kvjax.models.model import Model


class Answers(NamedTuple):
    """Contexts, questions and answers as rows of tokens, and the positions that predict the answers."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    said: Bool[Array, "B T"]


def answers(model: Model, samples: list[Sample]) -> Answers:
    """Build a batch from samples; the last token of an answer is predicted but is not an input."""
    given = padded(model, [[*s.context, *s.question, *s.answer[:-1]] for s in samples], None)
    ends, many = np.asarray(given.lengths)[:, None], np.array([[len(s.answer)] for s in samples])
    at = np.arange(given.tokens.shape[1])[None]
    said = (at >= ends - many) & (at < ends)
    return Answers(jnp.asarray(given.tokens), jnp.asarray(given.lengths), jnp.asarray(said))
