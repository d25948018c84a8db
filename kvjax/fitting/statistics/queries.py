"""Statistics of a model's queries: their main direction, their mean and their covariance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.prefill import padded
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation
from kvjax.keep.scores.trigonometric import pair_sizes
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.ops.base.rope import Rope
from kvjax.steps import Run


@dataclasses.dataclass(frozen=True)
class QuerySums(Observation):
    """The number of queries, sum q [N, H] and sum q q' [N, H, H], without the first `skip` queries of a row.

    rotated: whether the queries are taken after rotation.
    """

    rotated: bool
    skip: int = 0

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, ""], Float[Array, "N H"], Float[Array, "N H H"]]:
        counts = inputs.pos >= self.skip
        q = (inputs.q if self.rotated else inputs.q_raw).astype(jnp.float32)
        q = jnp.where(counts[:, None, :, None], q, 0.0)
        moments = jnp.einsum("bnth,bntj->nhj", q, q, precision="highest")
        return counts.sum().astype(jnp.float32), q.sum((0, 2)), moments


@dataclasses.dataclass(frozen=True)
class QueryLengths(Observation):
    """The number of queries, sum q [N, H] before rotation, and sum |q_f| [N, F] of rotation pairs."""

    rope: Rope

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, ""], Float[Array, "N H"], Float[Array, "N F"]]:
        counts = inputs.pos >= 0
        q = jnp.where(counts[:, None, :, None], inputs.q_raw.astype(jnp.float32), 0.0)
        sizes = jnp.where(counts[:, None, :, None], pair_sizes(q, self.rope), 0.0)
        return counts.sum().astype(jnp.float32), q.sum((0, 2)), sizes.sum((0, 2))


def fit_norms(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the norms [L, K, H] of the channels of a group's rotated queries (arXiv:2407.21018).

    The root of the mean square over all tokens, summed over the heads of the group, in one pass over the
    texts.
    Raises InputError for a model whose layers differ in what they keep.
    """
    count, _, moments = summed_queries(model, batches, QuerySums(rotated=True), progress, "norms")
    square = np.einsum("lnhh->lnh", moments) / np.maximum(count, 1.0)[:, None, None]
    grouped = square.reshape(len(square), model.config.kv_heads, -1, square.shape[-1]).sum(2)
    return Fitted({"norms": np.sqrt(grouped).astype(np.float32)}, "QueryDrivenChannels", model.signature)


def fit_centres(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the mean [L, N, H] of unrotated queries, and the mean length [L, N, F] of their rotation pairs.

    In one pass over the texts (arXiv:2604.04921, section 4). Raises InputError for a model whose layers
    differ in what they keep.
    """
    asked = QueryLengths(Run(model.config, Method()).attention_spec(0).rope)
    count, total, sizes = summed_queries(model, batches, asked, progress, "centres")
    many = np.maximum(count, 1.0)[:, None, None]
    arrays = {"mean": (total / many).astype(np.float32), "size": (sizes / many).astype(np.float32)}
    return Fitted(arrays, "QueryCentres", model.signature)


def fit_filters(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the filter [L, K, H] of every KV head (section 3.2), in one pass over the texts.

    A query head's filter is the first right singular vector of its queries, with the sign for which their
    mean is positive; a KV head's is the mean over its group, as in the authors' code. Raises InputError for a
    model whose layers differ in what they keep.
    """
    _, total, moments = summed_queries(model, batches, QuerySums(rotated=True), progress, "filters")
    # The right singular vectors of Q are the eigenvectors of Q'Q, in ascending order.
    first = np.linalg.eigh(moments)[1][..., -1]
    sign = np.where((total * first).sum(-1, keepdims=True) < 0, -1, 1)
    layers, heads, width = first.shape
    grouped = (sign * first).reshape(layers, model.config.kv_heads, -1, width)
    filters = grouped.mean(2).astype(np.float32)
    return Fitted({"filters": filters}, "QueryFilters", model.signature)


def fit_statistics(
    model: Model,
    batches: list[list[list[int]]],
    *,
    sinks: int = 4,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the mean [L, N, H] and covariance [L, N, H, H] of unrotated queries (arXiv:2510.00636).

    In one pass over the texts, without the first `sinks` tokens of every text; the covariance divides by the
    number of queries less one. Raises InputError for a model whose layers differ in what they keep.
    """
    count, total, moments = summed_queries(model, batches, QuerySums(False, sinks), progress, "statistics")
    many = np.maximum(count, 2.0)[:, None, None]
    mean = total / many
    spread = moments - many[..., None] * mean[..., :, None] * mean[..., None, :]
    arrays = {"mean": mean, "covariance": spread / (many[..., None] - 1)}
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    return Fitted(arrays, "QueryStatistics", model.signature)


def summed_queries(
    model: Model,
    batches: list[list[list[int]]],
    sums: QuerySums | QueryLengths,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    what: str,
) -> list[np.ndarray]:
    """Sum `sums` over all batches, in float64, with the layers in front; `what` is named in errors."""
    check_whole(model, what)
    run, total = Run(model.config, Method()), None
    for rows in progress(batches):
        batch = padded(model, rows, None)
        found = _sums(run, sums, model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
        each = [np.asarray(x, np.float64) for x in found]
        total = each if total is None else [a + b for a, b in zip(total, each, strict=True)]
    assert total is not None
    return total


@partial(jax.jit, static_argnames=("run", "sums"))
def _sums(
    run: Run,
    sums: QuerySums | QueryLengths,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "L"], Float[Array, "L N H"], Float[Array, "L N *_"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({sums}))
    each = [f.observed[key_of(sums)] for f in prompt.fresh if isinstance(f, ComputedTokens)]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *each)
