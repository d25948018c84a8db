"""Fits the kernels by which queries read the residue of evicted tokens (LESS, arXiv:2402.09398)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.fitting.loops.descent import descended
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.grammar.when import PREFILL_END
from kvjax.keep.merges.residue import asked, summed
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.stacking import layers_of_groups
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys, merge, weigh
from kvjax.pure import bind
from kvjax.steps.shared.run import Run


class ResidueBatch(NamedTuple):
    """Texts, the tokens before each cut, and which of their slots are kept."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    cuts: Int[Array, "B"]
    kept: Bool[Array, "L B K T"]


def fit_residue(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    rank: int = 8,
    hidden: int = 512,
    rate: float = 1e-3,
    epochs: int = 40,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the kernels of a method's `Residue` in every layer, to give the layer's output with all slots.

    Every text is cut at a random place between a quarter and three quarters of it, which differs from epoch
    to epoch; what is before the cut is compressed by the method's keep, and the loss is the mean squared
    error of the layer's output at the queries after it, for every layer separately. Adam (arXiv:1412.6980)
    takes one step per batch at learning rate `rate`, in `epochs` passes over the batches; rank, hidden: the
    sizes of the kernels. Raises InputError for a model whose layers are not all plain attention that keeps
    all tokens, for a keep of unequal heads, and for a budget under which nothing is evicted.
    """
    check_whole(model, "kernels")
    if hidden < 1:
        raise InputError(f"hidden is {hidden}, expected at least 1: kernels have a hidden layer")
    run, draw = kept_before(model, method, batches), np.random.default_rng(seed)

    def loss(arrays: dict[str, Array], batch: ResidueBatch, params: Params) -> Float[Array, ""]:
        return missed(run, params, arrays, batch).sum()

    read = (cut(model, run, rows, draw) for rows in progress([x for _ in range(epochs) for x in batches]))
    arrays = descended(loss, _drawn(model, rank, hidden, seed), read, model.params, rate=rate)
    return Fitted(arrays, "Residue", model.signature)


def kept_before(model: Model, method: Method, batches: list[list[list[int]]]) -> Run:
    """Build the run, without the method's merge, that selects the slots to keep of the tokens before a cut.

    Raises InputError for a keep of unequal heads, and for a budget under which nothing is evicted.
    """
    keep = method.keep
    assert keep is not None
    most = max(max(len(row) for rows in batches for row in rows) * 3 // 4, 1)
    if not keep.allocate.uniform or keep.budget.capacity(most) >= most:
        raise InputError(
            f"{method.id} has the budget {keep.budget.amount!r} and {keep.allocate!r}, and its fit learns "
            f"from what leaves heads of equal budgets, of {most} tokens at most: give less, as in budget=0.25"
        )
    return Run(model.config, bind(Method(dataclasses.replace(keep, merge=None, when=PREFILL_END)), model))


def cut(model: Model, run: Run, rows: list[list[int]], draw: np.random.Generator) -> ResidueBatch:
    """Cut texts at random places between a quarter and three quarters, and select the slots to keep."""
    given = padded(model, rows, None)
    lengths = np.asarray(given.lengths)
    share = draw.uniform(0.25, 0.75, len(lengths))
    cuts = jnp.asarray(np.maximum((lengths * share).astype(np.int32), 1))
    tokens = jnp.asarray(given.tokens)
    return ResidueBatch(tokens, jnp.asarray(lengths), cuts, _kept(run, model.params, tokens, cuts))


def _drawn(model: Model, rank: int, hidden: int, seed: int) -> dict[str, Array]:
    """Draw the kernels before they are fitted, as the authors' code draws them."""
    c = model.config
    keys = iter(jax.random.split(jax.random.key(seed), 5))

    def uniform(heads: int, rows: int, columns: int) -> Float[Array, "L K X R"]:
        most = (6 / (rows + columns)) ** 0.5
        return jax.random.uniform(next(keys), (c.layers, heads, rows, columns), minval=-most, maxval=most)

    small = jnp.full((c.layers, c.kv_heads, rank), 1e-4, jnp.float32)
    return {
        "q1": uniform(c.heads, c.head_dim, hidden),
        "q2": uniform(c.heads, hidden, rank),
        "k1": uniform(c.kv_heads, c.head_dim, hidden),
        "k2": uniform(c.kv_heads, hidden, rank),
        "mix": uniform(c.kv_heads, rank, rank),
        "scale": small,
        "scale_mix": small,
    }


@partial(jax.jit, static_argnames="run")
def _kept(
    run: Run, params: Params, tokens: Int[Array, "B T"], cuts: Int[Array, "B"]
) -> Bool[Array, "L B K T"]:
    """Which of the tokens before the cuts the method keeps."""
    most = tokens.shape[1]
    sizes: dict[str, Any] = dict(tokens_bound=most, room=0, compress=True)
    cache = steps.prefill(run, params, tokens, cuts, None, **sizes)[1]
    tails = [group.tail for group in cache.groups]
    pos = jnp.concatenate([tail.pos for tail in tails if tail is not None])
    at = jnp.where(pos < 0, most, pos)
    mark = lambda slots: jnp.zeros(most, bool).at[slots].set(True, mode="drop")  # noqa: E731
    return jax.vmap(jax.vmap(jax.vmap(mark)))(at)


def missed(run: Run, params: Params, arrays: dict[str, Array], batch: ResidueBatch) -> Float[Array, "L"]:
    """Compute the mean squared error of layers' outputs after the cuts, evicted slots read through kernels.

    A layer's inputs are those of the model with all slots.
    """
    at = positions(batch.tokens, batch.lengths, jnp.zeros_like(batch.lengths))
    old = (at.pos >= 0) & (at.pos < batch.cuts[:, None])
    asking = at.pos >= batch.cuts[:, None]

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Array]:
        whole, *_ = weigh([s], [keys])
        mine = jax.tree.map(lambda y: y[layer.number], arrays)
        gone = old[:, None] & ~batch.kept[layer.number]
        near = jnp.where((gone[:, :, None] & asking[:, None, :, None])[:, :, None], -jnp.inf, s)
        out = merge([weigh([near], [keys])[:2], asked(mine, summed(mine, keys.k, keys.v, gone), inputs.q)])[0]
        error = jnp.moveaxis(out - whole, 1, 2).reshape(*at.pos.shape, -1)
        w = layers_of_groups(params)[layer.group]["o"][layer.index].astype(jnp.float32)
        square = jnp.square(error @ w).mean(-1)
        return whole, jnp.where(asking, square, 0.0).sum() / jnp.maximum(asking.sum(), 1).astype(jnp.float32)

    found = read_whole(run.config, params, batch.tokens, at, attention, "kernels").collected
    return jnp.concatenate([jnp.atleast_1d(x) for x in found])
