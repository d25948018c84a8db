"""The first phase of fitting memory tokens: their slots imitate the slots of tokens of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.compress.select import ComputedTokens
from kvjax.fitting.loops.descent import Arrays, descended, warmed_up
from kvjax.fitting.prompts.questions import AnswerBatch, read_by
from kvjax.grammar import Method
from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import UnrotatedKeys
from kvjax.keep.prompts.memory_tokens import MemoryTokens
from kvjax.models.attending import rotated
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.steps import PrefillOutputs, Run

Loss = Callable[[Params, PrefillOutputs, AnswerBatch], Float[Array, ""]]


def fitted_memory(
    model: Model, run: Run, start: Arrays, batches: Iterator[AnswerBatch], loss: Loss,
    *, rate: float, imitate: int, alike: float,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Fit embeddings and weights of memory tokens that minimise loss(params, prompt, batch).

    The loss is `imitated` alone in the first `imitate` batches, and then the loss plus `alike` times
    `imitated`. A model that is not trained can use only slots that resemble its own, so answers give no
    useful gradient until the memory holds such slots; and with the loss of answers alone it soon learns only
    the form of answers.
    """
    word: MemoryTokens = run.method.reread
    assert word.fitted is not None
    digest = word.fitted.digest

    def far(arrays: Arrays, batch: AnswerBatch, params: Params) -> Float[Array, ""]:
        params = params | {"fitted": {digest: arrays}}
        return imitated(run, params, read_by(run, params, batch), batch)

    def both(arrays: Arrays, batch: AnswerBatch, params: Params) -> Float[Array, ""]:
        params = params | {"fitted": {digest: arrays}}
        prompt = read_by(run, params, batch)
        return loss(params, prompt, batch) + alike * imitated(run, params, prompt, batch)

    found = descended(far, start, islice(batches, imitate), model.params, rate=rate, rule=warmed_up)
    first = {name: jnp.asarray(x) for name, x in found.items()}
    return descended(both, first, batches, model.params, rate=rate, rule=warmed_up)


def imitated(run: Run, params: Params, prompt: PrefillOutputs, batch: AnswerBatch) -> Float[Array, ""]:
    """Compute the distance of contexts' memory from slots of the tokens that it represents (`stands_for`).

    The mean, over layers and over keys and values, of squared distances over squared lengths. A token's slot
    is the one that the model itself computes in the whole text, rotated to the position of the memory; for a
    memory that is a mean, it is the mean of these over chunks.
    """
    word: MemoryTokens = run.method.reread
    needs, plain = frozenset({UnrotatedKeys()}), Run(run.config, Method())
    whole = steps.read_tokens(plain, params, batch.context, batch.lengths, None, needs)
    slots = word.slots(word.chunks(batch.context.shape[1]))
    pos, off = prompt.positions.pos[:, :slots], []
    at, there = _stood_for(word, batch)
    for gm, mine, own in zip(run.groups(params), prompt.fresh, whole.fresh, strict=True):
        assert isinstance(mine, ComputedTokens) and isinstance(own, ComputedTokens) and own.v is not None
        rope = run.attention_spec(gm.first).rope
        raw, v = (_slots_of(word, x, at, there) for x in (own.observed[key_of(UnrotatedKeys())], own.v))
        k = jax.vmap(lambda x, rope=rope: rotated(rope, x, pos, pos.max(1) + 1))(raw)
        live = (there.any(1) if word.mean else there.reshape(len(pos), slots))[None, :, None, :, None]
        for said, want in ((mine.k, k), (mine.v, v)):
            assert said is not None
            error, length = (
                jnp.where(live, jnp.square(x.astype(jnp.float32)), 0.0).sum((1, 2, 3, 4))
                for x in (said[:, :, :, :slots] - want, want)
            )
            off.append(error / length)
    return jnp.concatenate(off).mean()


def _stood_for(word: MemoryTokens, batch: AnswerBatch) -> tuple[Int[Array, "B C M"], Bool[Array, "B C M"]]:
    """Find the tokens of a context that every chunk's memory represents, and which memory slots exist."""
    t, text = batch.context.shape[1], jnp.maximum(batch.lengths - 1, 0)
    size = word.chunk(t)
    before = size * jnp.arange(word.chunks(t), dtype=jnp.int32)
    tokens = jnp.clip(text[:, None] - before[None], 0, size)
    at = before[None, :, None] + jax.vmap(word.stands_for, 1, 1)(tokens)
    return at, jnp.arange(word.tokens)[None, None] < word.of(tokens)[..., None]


def _slots_of(
    word: MemoryTokens, x: Float[Array, "Lg B K T H"], at: Int[Array, "B C M"], there: Bool[Array, "B C M"]
) -> Float[Array, "Lg B K S H"]:
    """Return the slots of tokens, in the order of the memory that represents them."""
    rows, chunks, many = at.shape
    found = jnp.take_along_axis(x, at.reshape(1, rows, 1, chunks * many, 1), axis=3)
    if not word.mean:
        return found
    apart = found.reshape(*x.shape[:3], chunks, many, x.shape[-1])
    live = there.astype(jnp.float32)
    share = (live / jnp.maximum(live.sum(1, keepdims=True), 1.0)).astype(x.dtype)
    return (apart * share[None, :, None, ..., None]).sum(3)
