"""Fits gates that predict KVzip's scores from a layer's input (KVzap, arXiv:2601.07891, and Fast KVzip)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.keep.gates.gate import gated
from kvjax.keep.gates.gate_forms import sink_gate
from kvjax.keep.observations.observe import Hidden
from kvjax.methods import method as build_method
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import bind
from kvjax.steps import Run

# The lower bound of scores: the logarithms of smaller ones would dominate the fit.
LEAST = 1e-6
Progress = Callable[[Iterable[Any]], Iterable[Any]]


class GateBatch(NamedTuple):
    """The inputs of a model's layers in a batch, and KVzip's scores of its tokens; L: layers with slots."""

    hidden: Float[Array, "L B T D"]
    scores: Float[Array, "L B K T"]
    live: Bool[Array, "B T"]


def fit_gate(
    model: Model,
    batches: list[list[list[int]]],
    *,
    hidden: int = 0,
    epochs: int = 4,
    rate: float = 1e-3,
    ridge: float = 1e-3,
    seed: int = 0,
    progress: Progress = iter,
) -> Fitted:
    """Fit a gate for every layer, by least squares on the logarithm of KVzip's scores.

    hidden=0: a linear map, solved exactly from sums over one pass over the texts; ridge is relative to the
    mean square of the inputs. Otherwise a network of that hidden width, trained by Adam (arXiv:1412.6980) at
    learning rate `rate`, in `epochs` passes over the batches. Raises InputError for a model whose layers
    differ in what they keep.
    """
    if not hidden:
        return Fitted(_solved(read(model, batches, 1, progress), ridge), "HiddenGate", model.signature)
    c, keys = model.config, jax.random.split(jax.random.key(seed))
    arrays = {
        "in": jax.random.normal(keys[0], (c.layers, c.d_model, hidden)) * c.d_model**-0.5,
        "in_bias": jnp.zeros((c.layers, hidden)),
        "out": jax.random.normal(keys[1], (c.layers, hidden, c.kv_heads)) * hidden**-0.5,
        "out_bias": jnp.zeros((c.layers, c.kv_heads)),
    }

    def loss(arrays: Arrays, batch: GateBatch, _: Any) -> Float[Array, ""]:
        said = jax.vmap(gated)(arrays, batch.hidden)
        error = jnp.square(said - jnp.moveaxis(jnp.log(jnp.maximum(batch.scores, LEAST)), 2, 3))
        return _mean(jnp.moveaxis(error, 3, 2), batch.live)

    found = descended(loss, arrays, read(model, batches, epochs, progress), (), rate=rate)
    return Fitted(found, "HiddenGate", model.signature)


def fit_sink_gate(
    model: Model,
    batches: list[list[list[int]]],
    *,
    rank: int = 16,
    sink_keys: int = 16,
    epochs: int = 4,
    steps: int = 16,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Progress = iter,
) -> Fitted:
    """Fit a gate for every layer, of `rank` channels and `sink_keys` sinks, to predict KVzip's scores.

    The loss is the binary cross-entropy between both (section 3.3). Adam (arXiv:1412.6980) takes `steps`
    steps at learning rate `rate` on every batch, in `epochs` passes over the batches. Deviations: the authors
    use SGD with momentum on tokens of all texts at once, and initialise all sinks with zeros, which then stay
    equal to each other; ours are drawn at random. Raises InputError for a model whose layers differ in what
    they keep.
    """
    c, keys = model.config, jax.random.split(jax.random.key(seed), 4)
    group = c.heads // c.kv_heads
    arrays = {
        "q": uniform(keys[0], (c.layers, c.d_model, c.kv_heads, group, rank), c.d_model),
        "q_bias": uniform(keys[1], (c.layers, c.kv_heads, group, rank), c.d_model),
        "q_norm": jnp.ones((c.layers, rank)),
        "k": uniform(keys[2], (c.layers, c.d_model, c.kv_heads, rank), c.d_model),
        "k_norm": jnp.ones((c.layers, rank)),
        "sinks": uniform(keys[3], (c.layers, c.kv_heads, sink_keys, rank), rank),
        "bias": jnp.zeros((c.layers, c.kv_heads, group)),
    }
    found = descended(guessed, arrays, read(model, batches, epochs, progress), (), rate=rate, steps=steps)
    return Fitted(found, "SinkGate", model.signature)


def guessed(arrays: Arrays, batch: GateBatch, _: Any = ()) -> Float[Array, ""]:
    """Compute the mean binary cross-entropy of gates and KVzip's scores, over tokens, heads and layers."""
    said = jnp.clip(jax.vmap(sink_gate)(arrays, batch.hidden), LEAST, 1 - LEAST)
    entropy = batch.scores * jnp.log(said) + (1 - batch.scores) * jnp.log1p(-said)
    return _mean(-entropy, batch.live)


def _mean(x: Float[Array, "L B K T"], live: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Compute the mean over real tokens, heads and layers."""
    count = jnp.maximum(live.sum(), 1).astype(jnp.float32) * x.shape[0] * x.shape[2]
    return jnp.where(live[None, :, None], x, 0.0).sum() / count


def read(
    model: Model, batches: list[list[list[int]]], epochs: int, progress: Progress
) -> Iterator[GateBatch]:
    """Yield the layers' inputs and KVzip's scores for every batch of texts, `epochs` times."""
    check_whole(model, "gates")
    run = Run(model.config, bind(build_method("kvzip", budget=1.0, sinks=0), model))
    for rows in progress([rows for _ in range(epochs) for rows in batches]):
        given = padded(model, rows, None)
        yield _read(run, model.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))


@partial(jax.jit, static_argnames="run")
def _read(run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> GateBatch:
    needs = steps.needs_of(run, params) | {Hidden()}
    prompt = steps.observe(run._replace(method=Method()), params, tokens, lengths, None, needs)
    scores = steps.scored(run, params, prompt)
    hidden = jnp.concatenate(
        [f.observed[key_of(Hidden())] for f in prompt.fresh if isinstance(f, ComputedTokens)]
    )
    each, live = jnp.concatenate([scores[i] for i in sorted(scores)]), prompt.positions.pos >= 0
    return GateBatch(hidden.astype(jnp.float32), jnp.where(live[None, :, None], each, 0.0), live)


def _solved(batches: Iterable[GateBatch], ridge: float) -> dict[str, np.ndarray]:
    """Least squares of every layer, from sums in float64 over the batches."""
    squares, products = 0.0, 0.0
    for batch in batches:
        live = np.asarray(batch.live)
        x = np.asarray(batch.hidden, np.float64)[:, live]
        x = np.concatenate([x, np.ones_like(x[..., :1])], -1)
        scores = np.moveaxis(np.asarray(batch.scores, np.float64), 2, 3)[:, live]
        squares = squares + np.einsum("lti,ltj->lij", x, x)
        products = products + np.einsum("lti,ltk->lik", x, np.log(np.maximum(scores, LEAST)))
    assert isinstance(squares, np.ndarray)
    size = squares.shape[-1]
    weight = ridge * np.trace(squares[:, :-1, :-1], axis1=1, axis2=2) / max(size - 1, 1)
    # The constant is not regularised.
    penalty = weight[:, None, None] * np.diag([*np.ones(size - 1), 0.0])
    found = np.linalg.solve(squares + penalty, products).astype(np.float32)
    return {"out": found[:, :-1], "out_bias": found[:, -1]}
