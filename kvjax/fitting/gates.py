"""Gates that guess KVzip's scores from a layer's input (KVzap, arXiv:2601.07891)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.choose import Fresh
from kvjax.fitted import Fitted
from kvjax.fitting.whole import check_whole
from kvjax.grammar import Method
from kvjax.keep.gate import gated
from kvjax.keep.observe import Hidden
from kvjax.methods import method as build_method
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.prefilling import padded
from kvjax.pure import bind
from kvjax.steps import Run

# Scores below this are as good as none; their logarithm would rule the fit.
LEAST = 1e-6


class Batch(NamedTuple):
    """What the layers of a model saw of a batch and what their gates shall say: L layers with slots."""

    hidden: Float[Array, "L B T D"]
    target: Float[Array, "L B T K"]
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
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """A gate of every layer, by least squares on the logarithm of KVzip's scores.

    hidden=0: a linear map, exactly, from sums over one reading of all texts; ridge is relative to the mean
    square of the inputs. Otherwise a network of that hidden width, by Adam (arXiv:1412.6980) at learning rate
    `rate`, in `epochs` readings. Raises InputError for a model whose layers are not all alike in what they
    keep.
    """
    read = partial(_read, _run(model), model.params)
    if not hidden:
        arrays = _solved((_batch(model, read, rows) for rows in progress(batches)), ridge)
        return Fitted(arrays, "HiddenGate", model.fingerprint)
    optimiser, first = optax.adam(rate), _batch(model, read, batches[0])
    layers, *_, width = first.hidden.shape
    arrays = _drawn(jax.random.key(seed), (layers, width, hidden, first.target.shape[-1]))
    state = optimiser.init(arrays)
    for rows in progress([rows for _ in range(epochs) for rows in batches]):
        arrays, state = _improved(optimiser, arrays, state, _batch(model, read, rows))
    return Fitted({n: np.asarray(x) for n, x in arrays.items()}, "HiddenGate", model.fingerprint)


def _run(model: Model) -> Run:
    check_whole(model, "gates")
    return Run(model.config, bind(build_method("kvzip", budget=1.0, sinks=0), model))


@partial(jax.jit, static_argnames="run")
def _read(run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Batch:
    needs = steps.needs_of(run, params) | {Hidden()}
    prompt = steps.observe(run._replace(method=Method()), params, tokens, lengths, None, needs)
    scores = steps.scored(run, params, prompt)
    hidden = jnp.concatenate([f.observed[repr(Hidden())] for f in prompt.fresh if isinstance(f, Fresh)])
    target = jnp.log(jnp.maximum(jnp.concatenate([scores[i] for i in sorted(scores)]), LEAST))
    return Batch(hidden.astype(jnp.float32), jnp.moveaxis(target, 2, 3), prompt.positions.pos >= 0)


def _batch(model: Model, read: Callable[..., Batch], rows: list[list[int]]) -> Batch:
    given = padded(model, rows, None)
    return read(jnp.asarray(given.tokens), jnp.asarray(given.lengths))


def _solved(batches: Iterable[Batch], ridge: float) -> dict[str, np.ndarray]:
    """Least squares of every layer, from sums in float64 over the batches."""
    squares, products = 0.0, 0.0
    for batch in batches:
        live = np.asarray(batch.live)
        x = np.asarray(batch.hidden, np.float64)[:, live]
        x = np.concatenate([x, np.ones_like(x[..., :1])], -1)
        y = np.asarray(batch.target, np.float64)[:, live]
        squares = squares + np.einsum("lti,ltj->lij", x, x)
        products = products + np.einsum("lti,ltk->lik", x, y)
    assert isinstance(squares, np.ndarray)
    size = squares.shape[-1]
    weight = ridge * np.trace(squares[:, :-1, :-1], axis1=1, axis2=2) / max(size - 1, 1)
    # The constant is not held small.
    penalty = weight[:, None, None] * np.diag([*np.ones(size - 1), 0.0])
    found = np.linalg.solve(squares + penalty, products).astype(np.float32)
    return {"out": found[:, :-1], "out_bias": found[:, -1]}


def _drawn(key: Array, sizes: tuple[int, int, int, int]) -> dict[str, Array]:
    """A network of every layer before it is fitted."""
    layers, width, hidden, heads = sizes
    a, b = jax.random.split(key)
    return {
        "in": jax.random.normal(a, (layers, width, hidden)) * width**-0.5,
        "in_bias": jnp.zeros((layers, hidden)),
        "out": jax.random.normal(b, (layers, hidden, heads)) * hidden**-0.5,
        "out_bias": jnp.zeros((layers, heads)),
    }


@partial(jax.jit, static_argnames="optimiser")
def _improved(
    optimiser: optax.GradientTransformation, arrays: dict[str, Array], state: Any, batch: Batch
) -> tuple[dict[str, Array], Any]:
    """One step on a batch, of all layers at once."""

    def loss(arrays: dict[str, Array]) -> Array:
        said = jax.vmap(gated)(arrays, batch.hidden)
        error = jnp.where(batch.live[None, ..., None], (said - batch.target) ** 2, 0.0)
        count = jnp.maximum(batch.live.sum(), 1).astype(jnp.float32) * batch.target.shape[-1]
        return error.sum() / count

    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
        updates, state = optimiser.update(jax.grad(loss)(arrays), state, arrays)
    improved: Any = optax.apply_updates(arrays, updates)
    return improved, state
