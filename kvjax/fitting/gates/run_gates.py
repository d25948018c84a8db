"""Fits gates that decide which tokens share a slot, by distillation from the full cache (DMC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.gates.eviction_gates import EvictionLoss, mean_of, of_layer, relaxed
from kvjax.fitting.loops.cuts import CutTexts, KeptBeforeCut, cut_after_contexts, divergence, mean_before
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.merges.merge_runs import linear
from kvjax.models.attending import rotated
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.ops.attention.union import Keys


def fit_run_gates(
    model: Model,
    batches: list[list[Sample]],
    *,
    target: float = 0.5,
    penalty: float = 10.0,
    tau: float = 0.1,
    rate: float = 1e-2,
    epochs: int = 16,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit DMC's decisions and weights (arXiv:2403.09636, section 3.2) by distillation from the model itself.

    Contexts are merged by relaxed decisions a = sigmoid((logit + noise) / tau), where noise is the difference
    of two draws of a Gumbel distribution (`merged`). The loss is the divergence from the model with the full
    cache at the tokens that predict the answers, plus `penalty` max(0, target - mean a), where `target` is
    the share of tokens that are merged into another one's slot, 1 - 1 / the compression ratio. Adam
    (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes over the batches.
    Deviations: the model is not trained, while the authors continue to train all of it on all tokens of
    texts; `target` is constant instead of growing over the steps; and within a context, every token sees the
    others unmerged. Raises InputError for a model whose layers are not all plain attention that keeps all
    tokens.
    """
    check_whole(model, "gates")
    c, keys, aim = model.config, jax.random.split(jax.random.key(seed)), EvictionLoss(target, penalty, tau)
    start = {}
    for name, key in zip(("join", "weight"), keys, strict=True):
        start[name] = uniform(key, (c.layers, c.d_model, c.kv_heads), c.d_model)
        start[f"{name}_bias"] = jnp.zeros((c.layers, c.kv_heads))

    def loss(arrays: Arrays, batch: CutTexts, params: Params) -> Float[Array, ""]:
        return shared(c, params, arrays, batch, aim)

    read = cut_after_contexts(model, batches, epochs, seed, progress)
    return Fitted(descended(loss, start, read, model.params, rate=rate), "Opening", model.signature)


def shared(
    config: Config, params: Params, arrays: Arrays, batch: CutTexts, aim: EvictionLoss
) -> Float[Array, ""]:
    """Compute the loss of decisions and weights on a batch."""

    def leaving(layer: Layer, inputs: Inputs, keys: Keys, s: Array, before: Array) -> KeptBeforeCut:
        mine = of_layer(arrays, layer)
        logit = relaxed(linear(mine, "join", inputs), batch.seed, layer.number, aim.tau)
        assert inputs.v is not None
        k, v, amount = merged(logit, linear(mine, "weight", inputs), inputs.k_raw, inputs.v, before)
        found = mean_before(jax.nn.sigmoid(logit), before)
        return KeptBeforeCut(rotated(layer.rope, k, inputs.pos, inputs.length), v, amount, found)

    off, found = divergence(config, params, batch, leaving, "gates")
    return off + aim.penalty * jnp.maximum(aim.target - mean_of(found), 0.0)


def merged(
    joins: Float[Array, "B K T"],
    weight: Float[Array, "B K T"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T V"],
    before: Bool[Array, "B T"],
) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T V"], Float[Array, "B K T"]]:
    """Merge tokens by relaxed decisions; return (unrotated keys, values, what is added to the logits).

    With a_j = sigmoid(joins_j), but 0 for the first token, and w_j = sigmoid(weight_j), token i becomes
    sum_j c_ij w_j x_j / z_i for x = k and v, where c_ij = a_i+1 .. a_j for j >= i up to the cut, and z_i =
    sum_j c_ij w_j. log(z_i / w_i) + log(1 - a_i) is added to its logits. Tokens after the cut are unchanged.
    """
    t = joins.shape[-1]
    later = jnp.arange(t) > 0
    together = jnp.cumsum(jnp.where(later, jax.nn.log_sigmoid(joins), 0.0), -1)
    reach = jnp.tril(jnp.ones((t, t), bool)).T[None, None] & before[:, None, None, :]
    # Masked before the exponential, which could overflow for pairs that do not count.
    apart = jnp.where(reach, together[..., None, :] - together[..., :, None], 0.0)
    w = jax.nn.log_sigmoid(weight)
    share = jnp.where(reach, jnp.exp(apart + w[..., None, :]), 0.0)
    z = jnp.where(before[:, None], share.sum(-1), 1.0)
    mean = lambda x: jnp.einsum("bkij,bkjh->bkih", share, x) / z[..., None]  # noqa: E731
    amount = jnp.log(z) - w + jnp.where(later, jax.nn.log_sigmoid(-joins), 0.0)
    here = before[:, None, :, None]
    return jnp.where(here, mean(k), k), jnp.where(here, mean(v), v), amount
