"""Statistics of the projections of keys and values: second moments, and gradients of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.compat.model_fit import check_fit
from kvjax.compress.select import ComputedTokens
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import Hidden
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.stacking import layers_of_groups, with_layers
from kvjax.models.transformer import forward
from kvjax.steps import Run


class Sums(NamedTuple):
    """Over texts: y y' of keys and values before biases and norms, and squares of the loss' gradients."""

    keys: Float[Array, "L E E"]
    values: Float[Array, "L E E"]
    squares: dict[str, Float[Array, "L D E"]]


def fit_projections(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the arrays of `GroupedLowRank` (Palu, arXiv:2407.21118, section 3), in one pass over the texts.

    "keys" and "values": the mean over all tokens of y y' with y = x W. "fisher": the mean over a matrix of
    the root of the mean over texts of its squared gradient, where a text's loss is the mean negative log
    likelihood of its tokens after the first. Raises InputError for a model whose layers are not all plain
    attention, and for texts of one token.
    """
    check_fit(Method(make=GroupedLowRank(1)), model.config)
    total, tokens, texts = None, 0, 0
    for rows in progress(batches):
        batch = padded(model, rows, None, least=2)
        more = _read(model.config, model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
        total = more if total is None else jax.tree.map(jnp.add, total, more)
        tokens, texts = tokens + int(batch.lengths.sum()), texts + len(rows)
    assert total is not None
    root = {n: jnp.sqrt(x / texts).mean((1, 2)) for n, x in total.squares.items()}
    arrays = {"keys": total.keys / tokens, "values": total.values / tokens}
    arrays["fisher"] = jnp.stack([root["k"], root["v"]], 1)
    found = {n: np.asarray(x, np.float32) for n, x in arrays.items()}
    return Fitted(found, "GroupedLowRank", model.signature)


@partial(jax.jit, static_argnames="config")
def _read(config: Config, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Sums:
    prompt = steps.observe(Run(config, Method()), params, tokens, lengths, None, frozenset({Hidden()}))
    live = (prompt.positions.pos >= 0)[None, ..., None]
    moments: dict[str, list[Array]] = {"k": [], "v": []}
    for p, fresh in zip(layers_of_groups(params), prompt.fresh, strict=True):
        assert isinstance(fresh, ComputedTokens)
        x = jnp.where(live, fresh.observed[key_of(Hidden())].astype(jnp.float32), 0.0)
        for name, found in moments.items():
            y = jnp.einsum("lbtd,lde->lbte", x, p[name].astype(jnp.float32), precision="highest")
            found.append(jnp.einsum("lbte,lbtf->lef", y, y, precision="highest"))
    own = [{n: p[n] for n in ("k", "v")} for p in layers_of_groups(params)]

    def loss(own: list[Params], row: Int[Array, "T"], length: Int[Array, ""]) -> Array:
        pairs = zip(layers_of_groups(params), own, strict=True)
        changed = with_layers(params, [{**p, **mine} for p, mine in pairs])
        logits = forward(changed, row[None], config)[0, :-1].astype(jnp.float32)
        said = jnp.take_along_axis(jax.nn.log_softmax(logits), row[1:, None], axis=-1)[:, 0]
        counts = jnp.arange(1, row.shape[0]) < length
        return -jnp.where(counts, said, 0.0).sum() / (length - 1).astype(jnp.float32)

    def squared(row: tuple[Array, Array]) -> list[Params]:
        gradient = jax.grad(loss)(own, *row)
        return jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)), gradient)

    squares = jax.tree.map(lambda g: g.sum(0), jax.lax.map(squared, (tokens, lengths)))
    joined = {n: jnp.concatenate([p[n] for p in squares]) for n in ("k", "v")}
    return Sums(jnp.concatenate(moments["k"]), jnp.concatenate(moments["v"]), joined)
