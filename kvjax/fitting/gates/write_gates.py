"""Fits gates that decide which tokens to write to the cache, by distillation (WG-KV, arXiv:2512.17452)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.api.prefill import padded
from kvjax.fitting.loops.descent import Arrays, descended, uniform
from kvjax.fitting.loops.whole import check_whole, read_whole
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.gate_forms import write_gate
from kvjax.models.config import Config
from kvjax.models.layers import Params, stream_norm
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions
from kvjax.ops.attention.union import Keys, weigh


class TokenBatch(NamedTuple):
    """A batch of texts."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]


def fit_write_gate(
    model: Model,
    batches: list[list[list[int]]],
    *,
    hidden: int = 0,
    recent: int = 256,
    penalty: float = 0.04,
    rate: float = 1e-3,
    epochs: int = 8,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit a gate for every KV head, by distillation from the model itself (section 3.3).

    The logits of tokens that are `recent` or more tokens older than the query have the logarithm of their
    gate added. The loss is the mean squared change of the last hidden states, plus `penalty` times the share
    of attended tokens that the gates admit (`kept`). Adam (arXiv:1412.6980) takes one step per batch at
    learning rate `rate`, in `epochs` passes over the batches. hidden: the width of a head's network; 0 stands
    for 4 H, as in the authors' code. Deviation: theirs is AdamW, with a learning rate that rises and falls.
    Raises InputError for a model whose layers are not all plain attention that keeps all tokens.
    """
    check_whole(model, "gates")
    arrays = drawn(model.config, hidden or 4 * model.config.head_dim, seed)

    def loss(arrays: Arrays, batch: TokenBatch, params: Params) -> Float[Array, ""]:
        missed, through = distilled(model.config, recent, params, arrays, batch)
        return missed + penalty * through

    given = (padded(model, one, None) for one in progress([one for _ in range(epochs) for one in batches]))
    texts = (TokenBatch(jnp.asarray(one.tokens), jnp.asarray(one.lengths)) for one in given)
    return Fitted(descended(loss, arrays, texts, model.params, rate=rate), "WriteGate", model.signature)


def drawn(config: Config, hidden: int, seed: int) -> Arrays:
    """Gates before they are fitted, which let about half through."""
    c, keys = config, jax.random.split(jax.random.key(seed), 4)
    width = 2 * c.head_dim
    return {
        "norm": jnp.ones((c.layers, 2, c.head_dim)),
        "in": uniform(keys[0], (c.layers, c.kv_heads, width, hidden), width),
        "in_bias": uniform(keys[1], (c.layers, c.kv_heads, hidden), width),
        "out": uniform(keys[2], (c.layers, c.kv_heads, hidden), hidden),
        "out_bias": uniform(keys[3], (c.layers, c.kv_heads), hidden),
    }


def distilled(
    config: Config, recent: int, params: Params, arrays: Arrays, batch: TokenBatch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the gates' mean squared change of the last normalised hidden states, and the admitted share."""
    whole, _ = _hidden(config, recent, params, None, batch)
    gated, through = _hidden(config, recent, params, arrays, batch)
    live = jnp.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
    each = jnp.square(gated - jax.lax.stop_gradient(whole)).mean(-1)
    many = jnp.maximum(live.sum(), 1).astype(jnp.float32)
    return jnp.where(live, each, 0.0).sum() / many, through


def kept(g: Float[Array, "B K T"], lengths: Int[Array, "B"], recent: int) -> Float[Array, ""]:
    """Compute the mean of w + (1 - w) (1 - (1 - g)^2) over tokens: the share of later queries that see one.

    w = min(recent / (number of tokens from this one to the end), 1) is the share of later queries for which
    the token is within the `recent` window.
    """
    distance = lengths[:, None] - jnp.arange(g.shape[-1])[None]
    near = jnp.minimum(recent / jnp.maximum(distance, 1).astype(jnp.float32), 1.0)[:, None]
    each = near + (1 - near) * (1 - jnp.square(1 - g))
    count = jnp.maximum((distance > 0).sum(), 1).astype(jnp.float32) * g.shape[1]
    return jnp.where(distance[:, None] > 0, each, 0.0).sum() / count


def _hidden(
    config: Config, recent: int, params: Params, arrays: Arrays | None, batch: TokenBatch
) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
    """Compute the last hidden states after the norm, with gates or without, and the share the gates admit."""
    at = positions(batch.tokens, batch.lengths, jnp.zeros_like(batch.lengths))
    far = (at.pos[:, :, None] - at.pos[:, None] >= recent)[:, None, None]

    def attention(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Array]:
        if arrays is None:
            return weigh([s], [keys])[0], jnp.zeros(())
        assert inputs.k is not None
        g = write_gate({n: x[layer.number] for n, x in arrays.items()}, inputs.k_raw, inputs.k)
        s = s + jnp.where(far, jnp.log(g)[:, :, None, None], 0.0)
        return weigh([s], [keys])[0], kept(g, batch.lengths, recent)

    ran = read_whole(config, params, batch.tokens, at, attention, "gates")
    x = stream_norm(ran.x, params, "norm", config).astype(jnp.float32)
    return x, jnp.concatenate(ran.collected).mean()
