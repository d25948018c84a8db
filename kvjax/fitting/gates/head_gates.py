"""Fits head gates: which heads need the full cache (DuoAttention, arXiv:2410.10819)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.answers import Answers, answers
from kvjax.fitting.loops.descent import descended
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.scores.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys


def fit_head_gates(
    model: Model,
    batches: list[list[Sample]],
    *,
    sinks: int = 16,
    recent: int = 64,
    penalty: float = 0.05,
    rate: float = 0.02,
    epochs: int = 16,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a gate [L, K] for every KV head, by distillation from the model itself (section 2.2).

    A head returns gate * (its attention) + (1 - gate) * (its attention to the first `sinks` and the newest
    `recent` tokens alone). The gates start at 1. The loss is the mean square of the resulting change in the
    last hidden states at the tokens that predict the answers, plus `penalty` times the mean gate, as in the
    authors' code. Adam (arXiv:1412.6980) takes one step per batch at learning rate `rate`, in `epochs` passes
    over the batches. sinks and recent must be much smaller than the contexts, or the window alone suffices
    for every head.
    Raises InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "gates of heads")
    gates = jnp.ones((model.config.layers, model.config.kv_heads), jnp.float32)

    def loss(arrays: dict[str, Array], batch: Answers, params: Params) -> Float[Array, ""]:
        missed = distilled(model.config, (sinks, recent), params, arrays["gates"], *batch)
        return missed + penalty * arrays["gates"].mean()

    read = (answers(model, one) for one in progress([one for _ in range(epochs) for one in batches]))
    within = lambda arrays: {"gates": jnp.clip(arrays["gates"], 0.0, 1.0)}  # noqa: E731
    found = descended(loss, {"gates": gates}, read, model.params, rate=rate, within=within)
    return Fitted(found, "HeadGates", model.signature)


def distilled(
    config: Config,
    window: tuple[int, int],
    params: Params,
    gates: Float[Array, "L K"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    said: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """Compute the mean squared change by the gates of the last normalised hidden states at the tokens `said`.

    window: (sinks, recent), the tokens that a head of gate 0 attends to.
    """
    gated, whole = (
        _hidden(config, window, params, each, tokens, lengths) for each in (gates, jnp.ones_like(gates))
    )
    each = jnp.square(gated - jax.lax.stop_gradient(whole)).mean(-1)
    return jnp.where(said, each, 0.0).sum() / jnp.maximum(said.sum(), 1).astype(jnp.float32)


def _hidden(
    config: Config,
    window: tuple[int, int],
    params: Params,
    gates: Float[Array, "L K"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B T D"]:
    """Compute the last hidden states, after the norm, of a model whose heads are gated."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    sinks, recent = window
    apart = at.pos[:, :, None] - at.pos[:, None]
    far = (apart >= recent) & (at.pos[:, None] >= sinks)

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, None]:
        near = jnp.where(far[:, None, None], -jnp.inf, s)
        values = keys.v.astype(s.dtype)
        whole, part = (jnp.einsum("bkgts,bksv->bkgtv", probabilities(y), values) for y in (s, near))
        out = part + gates[layer.number][None, :, None, None, None] * (whole - part)
        return out.reshape(*inputs.q.shape[:3], -1), None

    x = read_whole(config, params, tokens, at, attention, "gates of heads").x
    return stream_norm(x, params, "norm", config).astype(jnp.float32)
