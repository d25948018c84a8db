"""Log-probabilities of a prompt's tokens as it is read, before a method evicts any."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.chunks import bucket
from kvjax.api.types import has_verbs
from kvjax.base.errors import InputError
from kvjax.hosts.arrays import fetch
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import forward
from kvjax.serve.device.jobs import TOP


class PromptScores(NamedTuple):
    """For every token but the first: its log-probability, and the N likeliest tokens with their own."""

    logprobs: Float[np.ndarray, "T"]
    top: Int[np.ndarray, "T N"]
    top_logprobs: Float[np.ndarray, "T N"]


@partial(jax.jit, static_argnames=("config", "top"))
def _scored(
    config: Config, params: Params, tokens: Int[Array, "1 T"], lengths: Int[Array, "1"], top: int
) -> tuple[Array, Array, Array]:
    logits = forward(params, tokens, config, lengths)[0, :-1]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(logprobs, tokens[0, 1:, None], 1)[:, 0]
    best, ids = jax.lax.top_k(logprobs, min(top, logprobs.shape[1]))
    return own, ids, best


def scored(model: Model, ids: list[int], top: int) -> PromptScores:
    """Scores the tokens of a prompt after the first, each beside the `top` likeliest in its place.

    Raises InputError for models with a `prefill` of their own.
    """
    if has_verbs(model):
        raise InputError(f"a {type(model).__name__} gives no log-probabilities of a prompt: leave echo out")
    tokens = np.zeros((1, bucket(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    lengths = np.array([len(ids)], np.int32)
    found = fetch(_scored(model.config, model.params, tokens, lengths, 1 if top <= 1 else TOP))
    own, ids_of_top, best = (np.asarray(x)[: len(ids) - 1] for x in found)
    return PromptScores(own, ids_of_top[:, :top], best[:, :top])
