"""Texts that are cut in two: the second part attends to what is left of the first after compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.eval.tasks.sample import Sample
from kvjax.fitting.loops.answers import answers
from kvjax.fitting.loops.whole import Attention, read_whole
from kvjax.grammar.kinds import Inputs
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.model import Model
from kvjax.models.transformer import positions, unembed
from kvjax.ops.attention.union import Keys, logits, weigh


class CutTexts(NamedTuple):
    """Texts, the tokens before each cut, the positions that predict the answers, and a random seed."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    cuts: Int[Array, "B"]
    said: Bool[Array, "B T"]
    seed: Int[Array, ""]


class KeptBeforeCut(NamedTuple):
    """What a layer keeps of the tokens before a cut: keys and values, and what is added to their logits.

    found: any value that the fit collects from the layer.
    """

    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T V"]
    amount: Float[Array, "B K T"]
    found: Any = None


# (the layer, its inputs, its keys, logits, which tokens are before the cut [B, T]) -> what the layer keeps.
Leaving = Callable[[Layer, Inputs, Keys, Array, Bool[Array, "B T"]], KeptBeforeCut]


def cut_after_contexts(
    model: Model, batches: list[list[Sample]], epochs: int, seed: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> Iterator[CutTexts]:  # fmt: skip
    """Yield batches of contexts, questions and answer, `epochs` times, cut where the questions begin."""
    draw = np.random.default_rng(seed)
    for samples in progress([samples for _ in range(epochs) for samples in batches]):
        given = answers(model, samples)
        cuts = jnp.asarray([len(s.context) for s in samples], jnp.int32)
        yield CutTexts(given.tokens, given.lengths, cuts, given.said, jnp.int32(draw.integers(2**31 - 1)))


def after_cuts(
    config: Config, params: Params, batch: Any, leaving: Leaving | None, what: str
) -> tuple[Float[Array, "B T Z"], Bool[Array, "B T"], tuple[Any, ...]]:
    """Return (logits, which tokens are after the cuts, the values collected in every group's layers).

    Tokens before a cut attend as usual; those after it see what `leaving` keeps of these, and each
    other. leaving: None to keep all. what: the name of the fit, for error messages.
    """
    at = positions(batch.tokens, batch.lengths, jnp.zeros_like(batch.lengths))
    before = (at.pos >= 0) & (at.pos < batch.cuts[:, None])
    later = at.pos >= batch.cuts[:, None]

    def whole(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Any]:
        return weigh([s], [keys])[0], jnp.zeros(())

    def thinned(layer: Layer, inputs: Inputs, keys: Keys, s: Array) -> tuple[Array, Any]:
        assert leaving is not None
        left = leaving(layer, inputs, keys, s, before)
        seen = Keys(left.k, left.v, keys.pos)
        near = logits(inputs.q, seen, at.pos, scale=layer.scale, softcap=config.attention_softcap)
        # Queries before the cut do not use these terms, which must not affect the gradients there.
        amount = jnp.where(before[:, None], left.amount, 0.0)[:, :, None, None]
        near = jnp.where(later[:, None, None, :, None], near + amount, s)
        part = weigh([near], [seen])[0]
        return jnp.where(later[:, None, :, None], part, whole(layer, inputs, keys, s)[0]), left.found

    attention: Attention = whole if leaving is None else thinned
    ran = read_whole(config, params, batch.tokens, at, attention, what)
    return unembed(params, ran.x, config).astype(jnp.float32), later, ran.collected


def divergence(
    config: Config, params: Params, batch: CutTexts, leaving: Leaving, what: str
) -> tuple[Float[Array, ""], tuple[Any, ...]]:
    """(KL(p || q), the values collected in every group's layers).

    The mean in nats over the tokens that predict the answers; p is what the model predicts there with all
    slots, and q with what the method keeps.
    """
    told, *_ = after_cuts(config, params, batch, None, what)
    said, _, found = after_cuts(config, params, batch, leaving, what)
    return divergence_of(told, said, batch.said), found


def divergence_of(
    told: Float[Array, "B T Z"], said: Float[Array, "B T Z"], at: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """KL(p || q) in nats, the mean over the tokens `at`; p by the logits `told`, which get no gradient."""
    wanted = jax.lax.stop_gradient(jax.nn.log_softmax(told))
    each = (jnp.exp(wanted) * (wanted - jax.nn.log_softmax(said))).sum(-1)
    many = jnp.maximum(at.sum(), 1).astype(jnp.float32)
    return jnp.where(at, each, 0.0).sum() / many


def mean_before(x: Float[Array, "B K T"], before: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Compute the mean over the tokens before cuts, and over heads."""
    many = jnp.maximum(before.sum(), 1).astype(jnp.float32) * x.shape[1]
    return jnp.where(before[:, None], x, 0.0).sum() / many
