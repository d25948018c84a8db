"""Gates of heads: which of them a model needs whole to say what it says (DuoAttention, arXiv:2410.10819)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.eval.tasks.sample import Sample
from kvjax.fitted import Fitted
from kvjax.fitting.whole import check_whole, read_whole
from kvjax.keep.score import probabilities
from kvjax.models.config import Config
from kvjax.models.layers import Params, rms_norm
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys
from kvjax.prefilling import padded


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
    """A gate [L, K] of every KV head, by distillation from the model itself (section 2.2).

    A head gives gate * (its attention) + (1 - gate) * (its attention to the first `sinks` and the newest
    `recent` tokens alone). The gates, which start at 1, come to minimise what this changes of the last hidden
    states where the model says answers, plus `penalty` times their mean, as in the authors' code. By Adam
    (arXiv:1412.6980) at learning rate `rate`, one step per batch, in `epochs` readings. sinks and recent must
    be much smaller than the contexts, or no head is missed. Raises InputError for a model whose layers are
    not all plain attention that keeps all tokens.
    """
    check_whole(model, "gates of heads")
    heads = model.config.kv_heads
    gates, optimiser = jnp.ones((model.config.layers, heads), jnp.float32), optax.adam(rate)
    state = optimiser.init(gates)
    for samples in progress([one for _ in range(epochs) for one in batches]):
        rows = [[*s.context, *s.question, *s.answer[:-1]] for s in samples]
        given = padded(model, rows, None)
        ends, answers = np.asarray(given.lengths)[:, None], np.array([[len(s.answer)] for s in samples])
        at = np.arange(given.tokens.shape[1])[None]
        said = (at >= ends - answers) & (at < ends)
        gates, state = _improved(
            optimiser, model.config, (sinks, recent), penalty, model.params, gates, state,
            jnp.asarray(given.tokens), jnp.asarray(given.lengths), jnp.asarray(said),
        )  # fmt: skip
    return Fitted({"gates": np.asarray(gates)}, "HeadGates", model.fingerprint)


@partial(jax.jit, static_argnames=("optimiser", "config", "window", "penalty"))
def _improved(
    optimiser: optax.GradientTransformation,
    config: Config,
    window: tuple[int, int],
    penalty: float,
    params: Params,
    gates: Float[Array, "L K"],
    state: Any,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    said: Bool[Array, "B T"],
) -> tuple[Float[Array, "L K"], Any]:
    """One step on a batch; gates stay between 0 and 1."""

    def loss(gates: Float[Array, "L K"]) -> Float[Array, ""]:
        return distilled(config, window, params, gates, tokens, lengths, said) + penalty * gates.mean()

    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
        updates, state = optimiser.update(jax.grad(loss)(gates), state, gates)
    improved: Any = optax.apply_updates(gates, updates)
    return jnp.clip(improved, 0.0, 1.0), state


def distilled(
    config: Config,
    window: tuple[int, int],
    params: Params,
    gates: Float[Array, "L K"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    said: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """The mean square of what gates change in the last normalised hidden states of the tokens `said`.

    window: (sinks, recent), what a head of gate 0 attends to.
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
    """The last hidden states, behind the norm, of a model whose heads are gated."""
    at = positions(tokens, lengths, jnp.zeros_like(lengths))
    sinks, recent = window
    apart = at.pos[:, :, None] - at.pos[:, None]
    far = (apart >= recent) & (at.pos[:, None] >= sinks)

    def attention(layer: Layer, q: Array, keys: Keys, s: Array) -> tuple[Array, None]:
        near = jnp.where(far[:, None, None], -jnp.inf, s)
        values = keys.v.astype(s.dtype)
        whole, part = (jnp.einsum("bkgts,bksv->bkgtv", probabilities(y), values) for y in (s, near))
        out = part + gates[layer.number][None, :, None, None, None] * (whole - part)
        return out.reshape(*q.shape[:3], -1), None

    x = read_whole(config, params, tokens, at, attention, "gates of heads").x
    return rms_norm(x, params["norm"], config.norm_eps, config.norm_offset).astype(jnp.float32)
