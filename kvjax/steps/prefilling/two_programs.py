"""Prefill in two programs: one reads a prompt, one compresses it, so that methods share the first.

While a prompt is read, a method that selects among its slots needs only a few observations, and many methods
need the same ones. The program that reads is compiled per model and set of observations; the one that
selects compiles faster, and is compiled per method. A method that only stores uses a single program: between
two programs, the keys and values of all layers would be in memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.segments import ChunkHint
from kvjax.grammar import Method
from kvjax.grammar.calls import hiding_of
from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.kinds import Answering
from kvjax.grammar.read_kinds import Prefetching, Recycling, Remembering, Tracing
from kvjax.models.layers import Params
from kvjax.state.cache import Cache
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.prefilling.read import PrefillOutputs, needs_of
from kvjax.steps.prefilling.settle import settled
from kvjax.steps.shared.run import Run

# Reads for which slots carry traces.
_OF_SLOTS = Prefetching | Recycling | Remembering | Tracing


def chooses(method: Method) -> bool:
    """Whether a method selects among a prompt's slots, so that two programs read and compress it."""
    return any(one.keep is not None and one.keep.score is not None for one in method.sentences)


def reading(run: Run) -> Run:
    """Return the part of a run that reading a prompt depends on: for most methods, nothing of the method.

    Which tokens a layer reads, hides or attends to, the phase of its keys, what answers for evicted slots,
    codecs that need fitted arrays, and what a read records for every query head change what is read.
    """
    keeps = [one.keep for one in run.method.sentences if one.keep is not None]
    own = any(k.narrow is not None or isinstance(k.merge, Answering) or hiding_of(k) for k in keeps)
    each = run.method.keep is not None and run.method.keep.per_query_head
    own = own or run.unrotated or (each and isinstance(run.method.read, _OF_SLOTS))
    own = own or any(one.read_prompt is not None for one in run.method.sentences)
    own = own or any(True for one in run.method.sentences for _ in fitted_words(one.store))
    return run if own or run.method.reread is not None else run._replace(method=Method())


@partial(jax.jit, static_argnames=("run", "needs"))
def read(
    run: Run,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache | None,
    needs: frozenset,
) -> tuple[Float[Array, "B V"], PrefillOutputs]:
    """Logits at each row's last new token, and the prompt without them."""
    prompt = observe(run, params, tokens, lengths, cache, needs)
    return prompt.logits, prompt._replace(logits=prompt.logits[:, :0])


@partial(jax.jit, static_argnames=("run", "tokens", "room", "ahead"))
def compress(
    run: Run,
    params: Params,
    prompt: PrefillOutputs,
    logits: Float[Array, "B V"],
    cache: Cache | None,
    *,
    tokens: int,
    room: int,
    ahead: ChunkHint,
) -> tuple[Cache, Bool[Array, "layers B"]]:
    """Compress the cache of a prompt; return it, and the layers in which a score is NaN.

    Rows whose logits are NaN are not counted there.
    """
    prompt = prompt._replace(logits=logits)
    new, lost = settled(run, params, prompt, cache, tokens=tokens, room=room, compress=True, ahead=ahead)
    return new, lost & ~jnp.isnan(logits).any(-1)[None]


def prefill_apart(
    run: Run,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    cache: Cache | None,
    *,
    tokens_bound: int,
    room: int,
    ahead: ChunkHint,
    question: tuple[Int[Array, "B W"], Int[Array, "B"]] | None = None,
) -> tuple[Float[Array, "B V"], Cache, Bool[Array, "layers B"]]:
    """`kvjax.steps.prefill(..., compress=True, watched=True)` in two programs.

    The prompt is freed after the second one. It is not donated, because no array of the cache is as large as
    one of the prompt's and could reuse its memory. question: as in `PrefillOutputs`.
    """
    sizes: dict[str, Any] = dict(tokens=tokens_bound, room=room, ahead=ahead)
    logits, prompt = read(reading(run), params, tokens, lengths, cache, needs_of(run, params))
    prompt = prompt._replace(question=question)
    return logits, *compress(run, params, prompt, logits, cache, **sizes)
