"""Samples as rows of tokens, with the tokens at which a model says the answers."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.api.prefill import padded
from kvjax.eval.tasks.sample import Sample
from kvjax.models.model import Model


class Answers(NamedTuple):
    """Contexts, questions and answers as texts, and the tokens at which the model says the answers."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    said: Bool[Array, "B T"]


def answers(model: Model, samples: list[Sample]) -> Answers:
    """A batch of samples as texts; the last token of an answer is said and not read."""
    given = padded(model, [[*s.context, *s.question, *s.answer[:-1]] for s in samples], None)
    ends, many = np.asarray(given.lengths)[:, None], np.array([[len(s.answer)] for s in samples])
    at = np.arange(given.tokens.shape[1])[None]
    said = (at >= ends - many) & (at < ends)
    return Answers(jnp.asarray(given.tokens), jnp.asarray(given.lengths), jnp.asarray(said))
