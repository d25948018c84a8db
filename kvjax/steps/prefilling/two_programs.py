"""A prompt that one program reads and another compresses, so that methods share the first, a decoder.

Where a method chooses among a prompt's slots, all that it has to be told while the prompt is read is a few
observations, and many methods ask for the same ones. Reading is compiled for a model and those; choosing,
which compiles sooner, for every method. What only stores is read and stored by one program: between two of
them, the keys and values of all layers would lie in memory.
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
from kvjax.grammar.protocols import Answering
from kvjax.models.layers import Params
from kvjax.state.cache import Cache
from kvjax.steps.prefilling.observe import observe
from kvjax.steps.prefilling.read import Prompt, needs_of
from kvjax.steps.prefilling.settle import settled
from kvjax.steps.shared.run import Run


def chooses(method: Method) -> bool:
    """Whether a method chooses among the slots of a prompt, so that it is read and compressed apart."""
    return any(one.keep is not None and one.keep.score is not None for one in method.sentences)


def reading(run: Run) -> Run:
    """What reading a prompt depends on beside the observations: nothing of most methods.

    Which tokens a layer sees or hides, the phase of its keys, what answers for slots that have left, and
    codes that only fitted arrays can read change what is read.
    """
    keeps = [one.keep for one in run.method.sentences if one.keep is not None]
    own = any(k.narrow is not None or isinstance(k.merge, Answering) or hiding_of(k) for k in keeps)
    own = own or run.unrotated
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
) -> tuple[Float[Array, "B V"], Prompt]:
    """Logits at each row's last new token, and the prompt without them."""
    prompt = observe(run, params, tokens, lengths, cache, needs)
    return prompt.logits, prompt._replace(logits=prompt.logits[:, :0])


@partial(jax.jit, static_argnames=("run", "tokens", "room", "ahead"))
def compress(
    run: Run,
    params: Params,
    prompt: Prompt,
    logits: Float[Array, "B V"],
    cache: Cache | None,
    *,
    tokens: int,
    room: int,
    ahead: ChunkHint,
) -> tuple[Cache, Bool[Array, "layers B"]]:
    """The cache of a prompt, and the layers in which a score is not a number.

    Rows whose logits are no numbers count for nothing there.
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

    The prompt leaves memory with the second. It is not donated, because no array of the cache is as large as
    one of the prompt's and could lie in its place. question: as in `Prompt`.
    """
    sizes: dict[str, Any] = dict(tokens=tokens_bound, room=room, ahead=ahead)
    logits, prompt = read(reading(run), params, tokens, lengths, cache, needs_of(run, params))
    prompt = prompt._replace(question=question)
    return logits, *compress(run, params, prompt, logits, cache, **sizes)
