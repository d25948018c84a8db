"""Forced tokens: `force` reads given tokens as decode steps would, in one pass if that is the same."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.prefill import bare_cache
from kvjax.api.step import stepping
from kvjax.api.types import Step, has_verbs
from kvjax.api.verify import takes_fewer_passes, verify
from kvjax.grammar import Method
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import decoding
from kvjax.state.cache import Cache


class ForcedTokens(NamedTuple):
    """Right-padded tokens, how many of each row are read, and the target token after each."""

    tokens: Int[np.ndarray, "B F"]
    count: Int[np.ndarray, "B"]
    targets: Int[np.ndarray, "B F"]


class TargetScores(NamedTuple):
    """log p of tokens, in nats, and the likeliest token at each place."""

    logprobs: Float[Array | np.ndarray, "B F"]
    best: Int[Array | np.ndarray, "B F"]


class Forced(NamedTuple):
    """The scores of all targets, the logits after each row's last token, and the cache that holds the tokens.

    Rows without a token keep their logits; scores after a row's last token are meaningless.
    """

    scored: TargetScores
    logits: Float[Array, "B V"]
    cache: Cache


def force(
    model: Model,
    method: Method,
    cache: Cache,
    given: ForcedTokens,
    logits: Float[Array, "B V"],
    *,
    implementation: str | None = None,
    keep: bool = False,
) -> Forced:
    """Read given tokens over a cache, each attending to all before it, as single steps would.

    It takes one pass if `verify` gives the same result, else a loop of steps on the device. The given cache
    may be consumed (donated), except with keep=True. logits: those after each row's last token so far.
    """
    count = np.asarray(given.count)
    if not keep and count.any() and _one_pass(model, method, cache, count, implementation):
        width = int(count.max())
        found, cache = verify(
            model, cache, given.tokens[:, :width], lengths=count, implementation=implementation
        )
        scored, logits = _of_pass(found, jnp.asarray(given.targets[:, :width]), jnp.asarray(count), logits)
        spare = given.tokens.shape[1] - width
        return Forced(TargetScores(*(jnp.pad(x, ((0, 0), (0, spare))) for x in scored)), logits, cache)
    one, params = stepping(model, method, implementation)
    append = np.arange(given.tokens.shape[1]) < count[:, None]
    tokens, append, targets = map(jnp.asarray, (given.tokens, append, given.targets))
    return Forced(*_stepped(one, params, bare_cache(cache), tokens, append, targets, logits))


def _one_pass(
    model: Model, method: Method, cache: Cache, count: Int[np.ndarray, "B"], implementation: str | None
) -> bool:
    if has_verbs(model):
        return False
    return takes_fewer_passes(model, decoding(model, method, implementation), cache, count)


@jax.jit
def _of_pass(
    found: Float[Array, "B F V"], targets: Int[Array, "B F"], count: Int[Array, "B"],
    logits: Float[Array, "B V"],
) -> tuple[TargetScores, Float[Array, "B V"]]:  # fmt: skip
    last = jnp.take_along_axis(found, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return scored(found, targets), jnp.where(count[:, None] > 0, last, logits)


@partial(jax.jit, static_argnames=("one",))
def _stepped(
    one: Step, params: Params, cache: Cache, tokens: Int[Array, "B F"], append: Bool[Array, "B F"],
    targets: Int[Array, "B F"], logits: Float[Array, "B V"],
) -> tuple[TargetScores, Float[Array, "B V"], Cache]:  # fmt: skip
    """Do the same by decode steps, one token at a time."""

    def read(
        carry: tuple[Cache, Array], given: tuple[Array, Array, Array]
    ) -> tuple[tuple[Cache, Array], TargetScores]:
        (cache, last), (token, append, target) = carry, given
        here, cache = one(params, cache, token, append)
        last = jnp.where(append[:, None], here, last)
        return (cache, last), TargetScores(*(x[:, 0] for x in scored(here[:, None], target[:, None])))

    (cache, logits), found = jax.lax.scan(read, (cache, logits), (tokens.T, append.T, targets.T))
    return TargetScores(*(x.T for x in found)), logits, cache


@jax.jit
def scored(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> TargetScores:
    """Compute log p of the targets by logits, and the likeliest tokens."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, targets[..., None].astype(jnp.int32), -1)[..., 0]
    best = jnp.argmax(wide, -1).astype(jnp.int32)
    return TargetScores(chosen - jax.nn.logsumexp(wide, -1), best)
