"""A language model that scores a text: the surprise of its tokens, and embeddings of its sentences."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.chunks import bucket
from kvjax.api.fork import fork
from kvjax.api.prefill import prefill
from kvjax.api.verify import verify
from kvjax.hosts.arrays import fetch
from kvjax.models.model import Model
from kvjax.models.transformer import hidden


class Reading:
    """A text that is read step by step: the model's cache of it so far, and its next logits.

    start: tokens before the text, at least one; most: how many tokens the text has at most.
    """

    def __init__(self, model: Model, start: Sequence[int], most: int):
        self.model = model
        self.next, self.cache = prefill(model, [list(start)], room=max(most, 1))

    def losses(self, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """-log p, in nats, of each of the next tokens, given all before it. The text is not changed."""
        logits, _ = verify(self.model, fork(self.cache, 1), [ids.tolist()])
        expected = jnp.concatenate([self.next[:, None], logits[:, :-1]], 1)
        return -np.asarray(_log_p(expected, jnp.asarray(ids)[None]))[0]

    def take(self, ids: Int[np.ndarray, "n"]) -> None:
        """Add tokens to the text."""
        if len(ids):
            logits, self.cache = verify(self.model, self.cache, [ids.tolist()])
            self.next = logits[:, -1]


def first_token(model: Model, ids: Int[np.ndarray, "T"]) -> tuple[list[int], int]:
    """Return the token before the text, and how many text tokens it takes: a model's own, or the first."""
    begins = model.special_tokens.get("bos_token")
    known = None if begins is None else model.tokenizer.token_to_id(begins)
    return ([int(ids[0])], 1) if known is None else ([known], 0)


def mean_loss(model: Model, ids: Int[np.ndarray, "T"], context: int = 0) -> float:
    """Compute the mean of -log p over all tokens but the first `context`, in nats; infinite without any."""
    start, skipped = first_token(model, ids)
    reading = Reading(model, start, len(ids))
    found = reading.losses(ids[skipped:])[max(context - skipped, 0) :]
    return float(found.mean()) if len(found) else float("inf")


def embeddings(model: Model, ids: Int[np.ndarray, "T"]) -> Float[np.ndarray, "T D"]:
    """Compute the output of the last layer for every token."""
    width = bucket(len(ids))
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    found = _hidden(model.params, jnp.asarray(padded), model.config, jnp.array([len(ids)], jnp.int32))
    return np.asarray(fetch(found))[0, : len(ids)].astype(np.float32)


_hidden = jax.jit(hidden, static_argnames="config")


@jax.jit
def _log_p(logits: Float[Array, "1 n V"], ids: Int[Array, "1 n"]) -> Float[Array, "1 n"]:
    return jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids[..., None], -1)[..., 0]
