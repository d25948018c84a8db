"""Filters of heads: the direction in which a model's queries lie (Q-Filters, arXiv:2503.02812)."""

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
from kvjax.choose import Fresh
from kvjax.fitted import Fitted
from kvjax.fitting.whole import check_whole
from kvjax.grammar import Method
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.prefilling import padded
from kvjax.protocols import Inputs
from kvjax.steps import Run


@dataclasses.dataclass(frozen=True)
class QuerySums:
    """sum q [N, H] and sum q q' [N, H, H] over all rotated queries of a batch."""

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "N H"], Float[Array, "N H H"]]:
        q = jnp.where((inputs.pos >= 0)[:, None, :, None], inputs.q.astype(jnp.float32), 0.0)
        return q.sum((0, 2)), jnp.einsum("bnth,bntj->nhj", q, q, precision="highest")


def fit_filters(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """The filter [L, K, H] of every KV head (section 3.2), in one reading of texts.

    A query head's is the first right singular vector of its queries, with the sign that gives them a
    positive mean; a KV head's is the mean over its group, as in the authors' code. Raises InputError for a
    model whose layers are not all alike in what they keep.
    """
    check_whole(model, "filters")
    run, total = Run(model.config, Method()), None
    for rows in progress(batches):
        batch = padded(model, rows, None)
        found = _sums(run, model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
        each = [np.asarray(x, np.float64) for x in found]
        total = each if total is None else [a + b for a, b in zip(total, each, strict=True)]
    assert total is not None
    mean, moments = total
    # The right singular vectors of Q are the eigenvectors of Q'Q, in ascending order.
    first = np.linalg.eigh(moments)[1][..., -1]
    sign = np.where((mean * first).sum(-1, keepdims=True) < 0, -1, 1)
    layers, heads, width = first.shape
    grouped = (sign * first).reshape(layers, model.config.kv_heads, -1, width)
    filters = grouped.mean(2).astype(np.float32)
    return Fitted({"filters": filters}, "QueryFilters", model.fingerprint)


@partial(jax.jit, static_argnames="run")
def _sums(
    run: Run, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "L N H"], Float[Array, "L N H H"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({QuerySums()}))
    each = [f.observed[repr(QuerySums())] for f in prompt.fresh if isinstance(f, Fresh)]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *each)
