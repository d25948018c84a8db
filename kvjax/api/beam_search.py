"""Beam search: finds likely continuations by keeping the best few after every token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.decode_loop import Slice
from kvjax.api.logit_processors import Processor, nothing_left, process, put
from kvjax.api.nan_checks import refuse_processed
from kvjax.api.rows import gather_rows
from kvjax.state.cache import Cache


class Beams(NamedTuple):
    """W beams of every prompt, the best first: summed log-probabilities and generated tokens.

    tokens are -1, and logprobs 0, after a stop token. A score is -inf if there are fewer texts than beams.
    """

    scores: Float[Array, "B W"]
    done: Bool[Array, "B W"]
    tokens: Int[Array, "B W M"]
    logprobs: Float[Array, "B W M"]


class Continuation(NamedTuple):
    """How each row continues: which row it is copied from, its token, and whether the token is appended."""

    row: Int[Array, "R"]
    token: Int[Array, "R"]
    append: Bool[Array, "R"]


def start(prompts: int, beams: int, new: int) -> Beams:
    """Return the initial beams: all beams of a prompt are the same text, so only the first counts."""
    scores = jnp.where(jnp.arange(beams)[None] == 0, 0.0, -jnp.inf)
    blank = (prompts, beams, new)
    return Beams(
        jnp.broadcast_to(scores, (prompts, beams)), jnp.zeros((prompts, beams), bool),
        jnp.full(blank, -1, jnp.int32), jnp.zeros(blank),
    )  # fmt: skip


@jax.jit
def choose(
    beams: Beams, logits: Float[Array, "R V"], count: Int[Array, ""], stop: Int[Array, "S"]
) -> tuple[Beams, Continuation]:
    """Choose the best W of all texts extended by one token; a text that has ended is not extended."""
    b, w = beams.scores.shape
    each = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(b, w, -1)
    vocab = each.shape[-1]
    stays = jnp.where(jnp.arange(vocab) == 0, 0.0, -jnp.inf)
    each = jnp.where(beams.done[..., None], stays[None, None], each)
    scores, best = jax.lax.top_k((beams.scores[..., None] + each).reshape(b, w * vocab), w)
    source, token = (best // vocab).astype(jnp.int32), (best % vocab).astype(jnp.int32)
    mine = jax.tree.map(
        lambda x: jnp.take_along_axis(x, source.reshape(b, w, *(1,) * (x.ndim - 2)), axis=1), beams
    )
    logprob = jnp.take_along_axis(each.reshape(b, -1), best, axis=1)
    new = Beams(
        scores,
        mine.done | (token[..., None] == stop[None, None]).any(-1),
        mine.tokens.at[:, :, count].set(jnp.where(mine.done, -1, token)),
        mine.logprobs.at[:, :, count].set(logprob),
    )
    row = jnp.arange(b, dtype=jnp.int32)[:, None] * w + source
    return new, Continuation(row.reshape(-1), token.reshape(-1), ~mine.done.reshape(-1))


_process = partial(jax.jit, static_argnames="processors")(process)


@jax.jit
def _followed(past: Int[Array, "R T"], choice: Continuation) -> Int[Array, "R T"]:
    """Gather the tokens so far of the chosen rows, with the new ones appended."""
    return put(past[choice.row], jnp.where(choice.append, choice.token, -1))


def search(
    advance: Callable[[Cache, Array, Array, Array], Slice],
    logits: Float[Array, "R V"],
    cache: Cache,
    *,
    beams: int,
    new: int,
    stop: Int[Array, "S"],
    refuse_nan: Callable[[int], None],
    processors: tuple[Processor, ...] = (),
    past: Int[Array, "R T"] | None = None,
) -> tuple[Beams, Cache]:
    """Up to `new` tokens after prompts whose logits and cache rows are repeated `beams` times each.

    advance: a step, (cache, logits before it, token, append) to logits and cache. past: the tokens so far,
    which processors see; scores are then of the processed logits. Texts are compared by their scores without
    length normalisation. The cache holds the rows in the order of the beams, stop tokens included.
    refuse_nan: called with the step whose logits are NaN.
    """
    found = start(logits.shape[0] // beams, beams, new)
    for i in range(new):
        if bool(jnp.isnan(logits).any()):
            refuse_nan(i)
        changed = logits
        if processors:
            assert past is not None
            changed = _process(processors, logits, past)
            if bool((nothing_left(changed) & ~found.done.reshape(-1)).any()):
                refuse_processed(i)
        found, choice = choose(found, changed, jnp.int32(i), stop)
        after = advance(gather_rows(cache, choice.row), logits, choice.token, choice.append)
        logits, cache = after.logits, after.cache
        if past is not None:
            past = _followed(past, choice)
        if bool((found.done | (found.scores == -jnp.inf)).all()):
            break
    return found, cache
