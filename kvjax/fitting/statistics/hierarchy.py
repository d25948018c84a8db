"""The mean logit at each distance, which HOMER subtracts when it scores tokens."""

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
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.ops.attention.union import Keys, logits
from kvjax.steps import Run


@dataclasses.dataclass(frozen=True)
class LogitsByDistance(Observation):
    """Sums max_n q_n,i k_j / sqrt(H) over pairs of a query and a key d tokens before it; counts the pairs.

    scale, softcap: those of the model's logits.
    """

    scale: float
    softcap: float | None

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
        pos, t = inputs.pos, inputs.pos.shape[1]
        assert inputs.k is not None
        keys = Keys(inputs.k, inputs.k, pos[:, None])
        largest = logits(inputs.q, keys, pos, scale=self.scale, softcap=self.softcap).max((1, 2))
        real = (pos >= 0)[:, :, None] & (pos >= 0)[:, None] & (pos[:, :, None] >= pos[:, None])
        apart = jnp.where(real, pos[:, :, None] - pos[:, None], t)
        sums = jnp.zeros(t + 1).at[apart].add(jnp.where(real, largest.astype(jnp.float32), 0.0))
        return sums[:t], jnp.zeros(t + 1).at[apart].add(1.0)[:t]


def fit_biases(
    model: Model,
    batches: list[list[list[int]]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the mean, over all pairs at a distance d, of the largest logit of the heads [L, D].

    One pass over the texts; D is the length of the longest text. Raises InputError for a model whose layers
    differ in what they keep.
    """
    check_whole(model, "biases")
    run, longest = Run(model.config, Method()), max(len(row) for rows in batches for row in rows)
    spec = run.attention_spec(0)
    asked = LogitsByDistance(spec.scale, spec.softcap)
    total, count = (np.zeros((model.config.layers, longest)) for _ in range(2))
    for rows in progress(batches):
        batch = padded(model, rows, None)
        found = _sums(run, asked, model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
        for all, some in zip((total, count), found, strict=True):
            width = min(longest, some.shape[1])
            all[:, :width] += np.asarray(some, np.float64)[:, :width]
    bias = (total / np.maximum(count, 1.0)).astype(np.float32)
    return Fitted({"bias": bias}, "Hierarchy", model.signature)


@partial(jax.jit, static_argnames=("run", "asked"))
def _sums(
    run: Run, asked: LogitsByDistance, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "L T"], Float[Array, "L T"]]:
    prompt = steps.observe(run, params, tokens, lengths, None, frozenset({asked}))
    each = [f.observed[key_of(asked)] for f in prompt.fresh if isinstance(f, ComputedTokens)]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *each)
