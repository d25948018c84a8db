"""Fits ADORE's controller to predict the tokens that the next query attends to most (arXiv:2407.02328)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.answers import answers
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.controller import after, asked_for
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys


class ControllerBatch(NamedTuple):
    """The inputs of layers, and whether the query after token t attends most to token j [L, B, K, T, T].

    counts: the pairs (t, j) in the loss: j is not newer than t, and there is a query after t.
    """

    hidden: Float[Array, "L B T D"]
    most: Bool[Array, "L B K T T"]
    counts: Bool[Array, "B T T"]


def fit_controller(
    model: Model,
    batches: list[list[Sample]],
    *,
    share: float = 0.125,
    hidden: int = 32,
    channels: int = 4,
    rate: float = 3e-3,
    epochs: int = 3,
    steps: int = 8,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a GRU of `hidden` states for every layer, with `channels` numbers per token in each KV head.

    For a text with its question and answer, the targets come from the model's own attention: at every query
    but the first, the `share` of earlier tokens with the most attention, summed over the heads of a group.
    The loss is the binary cross-entropy between these targets and sigmoid(score) of the controller's state
    one token earlier. Adam (arXiv:1412.6980) takes `steps` steps at learning rate `rate` on every batch, in
    `epochs` passes over the batches. Deviations: the paper trains the model along with its controller, and
    here every layer has its own controller. Raises InputError for a model whose layers are not all plain
    attention that keeps all tokens.
    """
    check_whole(model, "controllers")
    c, keys = model.config, jax.random.split(jax.random.key(seed), 4)
    start = {
        "in": uniform(keys[0], (c.layers, c.d_model, 3 * hidden), c.d_model),
        "in_bias": jnp.zeros((c.layers, 3 * hidden)),
        "state": uniform(keys[1], (c.layers, hidden, 3 * hidden), hidden),
        "state_bias": jnp.zeros((c.layers, 3 * hidden)),
        "ask": uniform(keys[2], (c.layers, hidden, c.kv_heads, channels), hidden),
        "ask_bias": jnp.zeros((c.layers, c.kv_heads, channels)),
        "told": uniform(keys[3], (c.layers, c.d_model, c.kv_heads, channels), c.d_model),
    }
    each = progress([one for _ in range(epochs) for one in batches])
    read = partial(_read, model, share, each)
    found = descended(lambda a, batch, _: missed(a, batch), start, read(), (), rate=rate, steps=steps)
    return Fitted(found, "Controller", model.signature)


def _read(model: Model, share: float, batches: Iterable[list[Sample]]) -> Iterator[ControllerBatch]:
    for samples in batches:
        given = answers(model, samples)
        yield looked_at(model.config, share, model.params, given.tokens, given.lengths)


@partial(jax.jit, static_argnums=(0, 1))
def looked_at(
    config: Config, share: float, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> ControllerBatch:
    """Record layer inputs, and the `share` of tokens with the most attention from each next query."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    order = jnp.arange(tokens.shape[1])
    counts = (order[None, :, None] >= order[None, None]) & (order[None, :, None] < lengths[:, None, None] - 1)
    last = jnp.ceil(share * (order + 1).astype(jnp.float32)).astype(jnp.int32) - 1

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, tuple[Array, Array]]:
        p = probabilities(s)
        out = jnp.einsum("bkgts,bksv->bkgtv", p, keys.v.astype(p.dtype)).reshape(*inputs.q.shape[:3], -1)
        # The target at t is the attention of query t + 1; the last token has none.
        next_one = jnp.where(counts[:, None], jnp.roll(p.sum(2), -1, axis=2), -1.0)
        best = -jnp.sort(-next_one, axis=-1)
        least = jnp.take_along_axis(best, jnp.broadcast_to(last[:, None], (*best.shape[:3], 1)), axis=-1)
        return out, (inputs.hidden, (next_one >= least) & (next_one > 0))

    ran = read_whole(config, params, tokens, at, attention, "controllers")
    hidden, most = (jnp.concatenate(part) for part in zip(*ran.collected, strict=True))
    return ControllerBatch(hidden.astype(jnp.float32), most, counts)


def missed(arrays: Arrays, batch: ControllerBatch) -> Float[Array, ""]:
    """Compute the mean binary cross-entropy of a controller's scores over token pairs, heads and layers."""
    score = jax.vmap(scores, in_axes=(0, 0, None))(arrays, batch.hidden, batch.counts.any(2))
    counts = batch.counts[None, :, None]
    off = jax.nn.softplus(score) - jnp.where(batch.most, score, 0.0)
    pairs = jnp.maximum(counts.sum(), 1).astype(jnp.float32) * score.shape[0] * score.shape[2]
    return jnp.where(counts, off, 0.0).sum() / pairs


def scores(
    arrays: Arrays, hidden: Float[Array, "B T D"], live: Bool[Array, "B T"]
) -> Float[Array, "B K T T"]:
    """One layer's scores, after every token, of all tokens."""
    states = after(arrays, hidden, live, jnp.zeros((hidden.shape[0], arrays["state"].shape[0])))
    known = jnp.einsum("btd,dkr->bktr", hidden, arrays["told"])
    return jnp.einsum("tbkr,bksr->bkts", asked_for(arrays, states), known)
