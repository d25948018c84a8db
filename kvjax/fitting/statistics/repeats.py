"""Heads that attend to earlier repeats of a text: echo and induction heads (RazorAttention)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.api.prefill import padded
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys


def fit_repeating_heads(
    model: Model,
    batches: list[list[list[int]]],
    *,
    tokens: int = 128,
    repeats: int = 4,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the echo and the induction score [L, N] of every query head (arXiv:2407.15891, section 3.2).

    At most `tokens` tokens of a text are shuffled, by `seed`, and repeated `repeats` times. From the second
    repeat on, a query's echo score is the attention to its own token in earlier repeats, and its induction
    score that to the tokens that followed it there; both are means over queries and texts. Deviation: the
    paper repeats tokens drawn from the whole vocabulary. Raises InputError for a model whose layers are not
    all plain attention that keeps all tokens.
    """
    check_whole(model, "repeating heads")
    rng, total, count = np.random.default_rng(seed), np.zeros(()), 0
    for texts in progress(batches):
        shuffled = [rng.permutation(np.asarray(text)[:tokens]) for text in texts]
        given = padded(model, [np.tile(text, repeats).tolist() for text in shuffled], None)
        periods = np.array([len(text) for text in shuffled], np.int32)
        found = _looked_back(
            model.config, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths),
            jnp.asarray(periods),
        )  # fmt: skip
        total, count = total + np.asarray(found, np.float64).sum(2), count + len(texts)
    echo, induction = (np.asarray(x / count, np.float32) for x in total)
    return Fitted({"echo": echo, "induction": induction}, "RepeatingHeads", model.signature)


@partial(jax.jit, static_argnames=("config",))
def _looked_back(
    config: Config,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    periods: Int[Array, "B"],
) -> Float[Array, "2 L B N"]:
    """Echo and induction scores, the means over the queries after the first `periods` tokens."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    apart = at.pos[:, :, None] - at.pos[:, None]
    # The distance to the same token is a multiple of the period; to the token that followed it, one less.
    echoes, follows = ((apart > 0) & ((apart + more) % periods[:, None, None] == 0) for more in (0, 1))
    repeated = (at.pos >= periods[:, None])[:, None, None]
    queries = jnp.maximum(repeated.sum(-1), 1).astype(jnp.float32)

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Array]:
        p = probabilities(s)
        out = jnp.einsum("bkgts,bksv->bkgtv", p, keys.v.astype(s.dtype)).reshape(*inputs.q.shape[:3], -1)
        each = [jnp.where(x[:, None, None], p, 0.0).sum(-1) for x in (echoes, follows)]
        found = [jnp.where(repeated, x, 0.0).sum(-1) / queries for x in each]
        return out, jnp.stack([x.reshape(*inputs.q.shape[:2]) for x in found])

    ran = read_whole(config, params, tokens, at, attention, "repeating heads")
    return jnp.moveaxis(jnp.concatenate(ran.collected), 0, 1)
