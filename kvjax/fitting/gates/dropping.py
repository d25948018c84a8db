"""Fits the interactions by which newer tokens drop older ones, by distillation from the full cache (DCP)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.gates.eviction_gates import mean_of, of_layer
from kvjax.fitting.loops.cuts import CutTexts, cut_after_contexts, divergence_of
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions, unembed
from kvjax.ops.attention.union import Keys, weigh

# Log-odds beyond this bound count as certain, and a dropped token keeps exp(-16) of its weight.
MOST = 16.0
# The initial bias, with which a token is not dropped even by many newer tokens.
START = 8.0


class Softened(NamedTuple):
    """A batch, and the alpha of its sparse sigmoids."""

    texts: CutTexts
    alpha: Float[Array, ""]


def fit_dropping(
    model: Model,
    batches: list[list[Sample]],
    *,
    rank: int = 8,
    sparsity: float = 0.5,
    alpha: float = 4.0,
    rate: float = 3e-3,
    epochs: int = 12,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit DCP's interactions of `rank` channels (arXiv:2305.15805, section 3.1) for every layer.

    The log of I[n, j] = prod_{j < m <= n} sigmoid_a(a_m' b_j / sqrt(R) + c) is added to the logits of query n
    and key j, where sigmoid_a is the sparse sigmoid (`log_sparse_sigmoid`) and a rises from 1 to `alpha` over
    all steps on a cosine schedule. The loss is the divergence from the model with the full cache at the
    tokens that predict the answers, plus `sparsity` times the mean of I over layers and pairs j < n. Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: the model is not trained and serves as the teacher, while the authors train it on texts; and
    no sigmoid is below exp(-16). Raises InputError for a model whose layers are not all plain attention that
    keeps all tokens.
    """
    check_whole(model, "interactions")
    c, keys = model.config, jax.random.split(jax.random.key(seed))
    shape = (c.layers, c.d_model, rank)
    start = {name: uniform(key, shape, c.d_model) for name, key in zip(("query", "key"), keys, strict=True)}
    start["bias"] = jnp.full((c.layers, 1), START)

    def loss(arrays: Arrays, batch: Softened, params: Params) -> Float[Array, ""]:
        return dropped(c, params, arrays, batch, sparsity)

    read, steps = cut_after_contexts(model, batches, epochs, seed, progress), epochs * len(batches)
    softened = (Softened(texts, rising(i / steps, alpha)) for i, texts in enumerate(read))
    return Fitted(descended(loss, start, softened, model.params, rate=rate), "Dropping", model.signature)


def rising(share: float, most: float) -> Float[Array, ""]:
    """Alpha after a share of all steps: it rises from 1 to `most` on a cosine schedule.

    >>> [round(float(rising(share, 8.0)), 2) for share in (0.0, 0.5, 1.0)]
    [1.0, 4.5, 8.0]
    """
    return jnp.float32(1 + (most - 1) * (1 - np.cos(np.pi * share)) / 2)


def log_sparse_sigmoid(x: Float[Array, "*_"], alpha: Float[Array, ""]) -> Float[Array, "*_"]:
    """Compute log argmax_p p x + H(p), H = (p - p^alpha + q - q^alpha) / (alpha (alpha - 1)) (Tsallis).

    q = 1 - p (entmax of two, arXiv:1905.05702). It is the sigmoid for alpha = 1; otherwise it is 0 or 1 for
    |x| > 1 / (alpha - 1). p solves x = (p^(alpha - 1) - q^(alpha - 1)) / (alpha - 1), which is tabulated over
    the log-odds of p, from -16 to 16, and interpolated.

    >>> jnp.exp(log_sparse_sigmoid(jnp.asarray([-2.0, 0.0, 0.5, 2.0]), jnp.float32(2.0))).round(2).tolist()
    [0.0, 0.5, 0.75, 1.0]
    """
    odds = jnp.linspace(-MOST, MOST, 513)
    power = jnp.maximum(alpha - 1, 1e-4)
    risen = (jnp.expm1(power * jax.nn.log_sigmoid(y)) for y in (odds, -odds))
    found = (next(risen) - next(risen)) / power
    return jax.nn.log_sigmoid(jnp.interp(x, found, odds))


def dropped(
    config: Config, params: Params, arrays: Arrays, batch: Softened, sparsity: float
) -> Float[Array, ""]:
    """Compute the loss of interactions on a batch."""
    texts = batch.texts
    at = positions(texts.tokens, texts.lengths, jnp.zeros_like(texts.lengths))
    older = (at.pos[:, None] >= 0) & (at.pos[:, None] < at.pos[:, :, None])
    pairs = jnp.maximum(older.sum(), 1).astype(jnp.float32)

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array, drops: bool) -> tuple[Array, Any]:
        if not drops:
            return weigh([s], [keys])[0], jnp.zeros(())
        mine, x = of_layer(arrays, layer), inputs.hidden.astype(jnp.float32)
        each = jnp.einsum("btr,bsr->bts", x @ mine["query"], x @ mine["key"]) * mine["key"].shape[-1] ** -0.5
        stays = log_sparse_sigmoid(each + mine["bias"][0], batch.alpha)
        left = jnp.cumsum(jnp.where(older, stays, 0.0), 1)
        found = jnp.where(older, jnp.exp(left), 0.0).sum() / pairs
        return weigh([s + left[:, None, None]], [keys])[0], found

    def said(drops: bool) -> tuple[Array, tuple[Any, ...]]:
        how = partial(attention, drops=drops)
        ran = read_whole(config, params, texts.tokens, at, how, "interactions")
        return unembed(params, ran.x, config).astype(jnp.float32), ran.collected

    (told, _), (thinned, found) = said(False), said(True)
    return divergence_of(told, thinned, texts.said) + sparsity * mean_of(found)
