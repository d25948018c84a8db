"""How far a converted model is from its original, on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.models.block_transformer import BlockConfig
from kvjax.models.block_transformer import forward as forward_blocks
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.models.transformer import forward


class DistanceFromOriginal(NamedTuple):
    """The distance of a converted model from its original: mean KL in nats, share of equal predictions."""

    divergence: float
    agreement: float


def difference(model: Model, other: Model, texts: Sequence[Sequence[int]]) -> DistanceFromOriginal:
    """Compute the mean over all tokens of KL(model || other), and how often both predict the same token.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> difference(model, model, [[1, 2, 3]])
    DistanceFromOriginal(divergence=0.0, agreement=1.0)
    """
    total = np.zeros(3)
    for text in texts:
        tokens = jnp.asarray([list(text)], jnp.int32)
        total += np.asarray(_compared(model.params, other.params, tokens, model.config, other.config))
    return DistanceFromOriginal(float(total[0] / total[2]), float(total[1] / total[2]))


def _compare(
    params: Params, others: Params, tokens: Int[jax.Array, "B T"], config: Config, other: Config | BlockConfig
) -> tuple[jax.Array, jax.Array, int]:
    a = jax.nn.log_softmax(forward(params, tokens, config).astype(jnp.float32))
    of: Any = forward_blocks if isinstance(other, BlockConfig) else forward
    b = jax.nn.log_softmax(of(others, tokens, other).astype(jnp.float32))
    same = (a.argmax(-1) == b.argmax(-1)).sum()
    return jnp.sum(jnp.exp(a) * (a - b)), same, tokens.size


_compared = jax.jit(_compare, static_argnames=("config", "other"))
