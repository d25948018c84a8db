"""Fits retaining heads, which predict how much answers attend to a token (Locret, arXiv:2410.01805)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.answers import Answers, answers
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.gate_forms import retained
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys, weigh


class RetainingBatch(NamedTuple):
    """The queries, keys and values of texts, and the largest logit that answers give each earlier token."""

    q: Float[Array, "L B N T H"]
    k: Float[Array, "L B K T H"]
    v: Float[Array, "L B K T H"]
    largest: Float[Array, "L B K T"]
    counts: Bool[Array, "B T"]


def fit_retaining_heads(
    model: Model,
    batches: list[list[Sample]],
    *,
    hidden: int = 64,
    smooth: float = 2.5e-3,
    epochs: int = 8,
    steps: int = 16,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a retaining head of width `hidden` (1024 in the paper) for every layer, on correct answers.

    The target (section 3.3) for a token of the context or the question is the causal importance score: the
    largest logit q k / sqrt(H) that it gets, over the queries of the answer and a group's heads. The loss is
    the smooth L1 loss plus `smooth` times the mean squared difference between the predictions for
    neighbouring tokens, summed over layers. Adam (arXiv:1412.6980) takes `steps` steps at learning rate
    `rate` on every batch, in `epochs` passes over the batches. Deviations: the answer's queries are those
    that predict its tokens, so the query of the token before the answer counts and that of its last token
    does not; and the authors use AdamW with warm-up. Raises InputError for a model whose layers are not all
    plain attention that keeps all tokens.
    """
    check_whole(model, "retaining heads")
    c, keys = model.config, jax.random.split(jax.random.key(seed))
    width = (c.heads + 2 * c.kv_heads) * c.head_dim
    arrays = {
        "in": uniform(keys[0], (c.layers, width, hidden), width),
        "out": uniform(keys[1], (c.layers, hidden, c.kv_heads), hidden),
    }
    read = jax.jit(lambda params, given: looked_at(c, params, given))
    each = (
        read(model.params, answers(model, one))
        for one in progress([one for _ in range(epochs) for one in batches])
    )
    loss = lambda arrays, batch, _: missed(arrays, batch, smooth)  # noqa: E731
    found = descended(loss, arrays, each, (), rate=rate, steps=steps)
    return Fitted(found, "RetainingHead", model.signature)


def looked_at(config: Config, params: Params, given: Answers) -> RetainingBatch:
    """Compute queries, keys and values for texts, and the largest logits that answers give to tokens."""
    at = positions(given.tokens, given.lengths, jnp.zeros_like(given.lengths))

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Any]:
        out, *_ = weigh([s], [keys])
        asked = jnp.where(given.said[:, None, None, :, None], s, -jnp.inf)
        return out, (inputs.q_raw, inputs.k_raw, inputs.v, asked.max((2, 3)))

    ran = read_whole(config, params, given.tokens, at, attention, "retaining heads")
    q, k, v, largest = (jnp.concatenate(part) for part in zip(*ran.collected, strict=True))
    first = jnp.where(given.said, at.pos, at.pos.shape[1]).min(1)
    return RetainingBatch(q, k, v, largest, (at.pos >= 0) & (at.pos <= first[:, None]))


def missed(arrays: Arrays, batch: RetainingBatch, smooth: float) -> Float[Array, ""]:
    """Compute the loss of the retaining heads' predictions of the logits that answers give."""
    said = jax.vmap(retained)(arrays, batch.q, batch.k, batch.v)
    counts = batch.counts[None, :, None]
    apart = jnp.abs(jnp.where(counts, said - batch.largest, 0.0))
    error = jnp.where(apart < 1, 0.5 * apart**2, apart - 0.5)
    neighbours = jnp.where(counts[..., 1:], jnp.square(said[..., 1:] - said[..., :-1]), 0.0)
    tokens = jnp.maximum(batch.counts.sum(), 1).astype(jnp.float32) * said.shape[2]
    return error.sum() / (tokens * said.shape[0]) + smooth * neighbours.sum() / tokens
