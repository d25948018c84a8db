"""Prefills in chunks: runs the programs of a prefill on one chunk of the prompt after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.api.chunks import ChunkSize, plan
from kvjax.base.errors import InputError
from kvjax.grammar import Keep, Method
from kvjax.models.layers import Params
from kvjax.state.cache import Cache
from kvjax.steps import Run


class PaddedTokens(NamedTuple):
    """Right-padded tokens on the host, with their lengths."""

    tokens: np.ndarray
    lengths: np.ndarray


class ReadResult(NamedTuple):
    """The result of a prefill in chunks.

    logits: those of each row's last token. lost: for each chunk, which layers and rows had NaN scores.
    """

    logits: Float[Array, "B V"]
    cache: Cache
    lost: list[Array]


def read_chunks(
    run: Run, params: Params, batch: PaddedTokens, cache: Cache | None, sizes: Sequence[ChunkSize],
    width: int, compress: bool, last: int,
) -> ReadResult:  # fmt: skip
    """Read a prompt in chunks of `width` tokens; with `compress`, compress the cache after every chunk.

    sizes: the static sizes of each chunk's program (`kvjax.api.chunks.plan`). last: the number of tokens at
    the end of the prompt that a probe reads after every chunk; 0 for none.
    """
    call = partial(steps.prefill, compress=compress, watched=True)
    call = steps.prefill_apart if compress and steps.chooses(run.method) else call
    logits, lost = None, []
    for i, (piece, size) in enumerate(zip(_chunks(batch, width), sizes, strict=True)):
        new = jnp.asarray(piece.tokens), jnp.asarray(piece.lengths)
        ahead: dict[str, Any] = {"question": _question(batch, last, (i + 1) * width)} if last else {}
        here, cache, unranked = call(run, params, *new, cache, **size._asdict(), **ahead)
        lost.append(unranked)
        # A row that ended in an earlier chunk keeps the logits of its own last token.
        logits = here if logits is None else jnp.where((piece.lengths > 0)[:, None], here, logits)
    assert logits is not None and cache is not None
    return ReadResult(logits, cache, lost)


def chunk_keep(method: Method) -> Keep | None:
    """Return the keep whose slots chunks attend to, if answers attend to slots of another keep; else None."""
    return None if method.keep is None else getattr(method.keep.probe, "chunks", None)


def read_with_two_caches(
    run: Run, chunks: Keep, params: Params, batch: PaddedTokens, cache: Cache | None, width: int, room: int,
    last: int,
) -> ReadResult:  # fmt: skip
    """Read a text in chunks over one cache, and fill a second cache, over which the question is read.

    The question is the last `last` tokens of a prompt, the text is the rest. Chunks attend to the first
    cache, whose slots the keep `chunks` selects. The keys and values of every chunk also enter the second
    cache, where the question, read after each chunk, selects slots. In the end the question's own slots enter
    the second cache, which is returned. A given `cache` is the start of both.
    """
    other = run._replace(method=Method(chunks))
    text = batch._replace(lengths=np.maximum(batch.lengths - last, 0))
    asked = _question(batch, last, -1)
    assert asked is not None
    over, lost = cache, []
    if text.lengths.any():
        how: dict[str, Any] = dict(width=width, compress=True)
        over, other_sizes = plan(other, params, over, text.lengths, room=0, **how)
        cache, sizes = plan(run, params, cache, text.lengths, room=last, **how)
        needs = steps.needs_of(other, params) | steps.needs_of(run, params)
        for piece, *size in zip(_chunks(text, width), other_sizes, sizes, strict=True):
            new = jnp.asarray(piece.tokens), jnp.asarray(piece.lengths)
            logits, prompt = steps.read(steps.reading(other), params, *new, over, needs)
            over, unranked = _compressed(other, params, prompt, logits, over, size[0])
            lost.append(unranked)
            prompt = prompt._replace(question=asked)
            cache, unranked = _compressed(run, params, prompt, logits, cache, size[1])
            lost.append(unranked)
    end = PaddedTokens(np.asarray(asked[0]), np.asarray(asked[1]))
    cache, sizes = plan(run, params, cache, end.lengths, width=last, room=room, compress=True)
    read = read_chunks(run, params, end, cache, sizes, last, True, last)
    return read._replace(lost=[*lost, *read.lost])


def _compressed(
    run: Run,
    params: Params,
    prompt: steps.PrefillOutputs,
    logits: Float[Array, "B V"],
    cache: Cache | None,
    size: ChunkSize,
) -> tuple[Cache, Array]:
    bound, room, ahead = size
    return steps.compress(run, params, prompt, logits, cache, tokens=bound, room=room, ahead=ahead)


def question_tokens(method: Method, lengths: Int[np.ndarray, "B"]) -> int:
    """Count the tokens at the end of a prompt that a method's probe reads after every chunk; 0 for none.

    Raises InputError if the budget of a row is smaller than this number.
    """
    keep = method.keep
    last = 0 if keep is None else getattr(keep.probe, "last", 0)
    if keep is None or not last:
        return 0
    for length in lengths.tolist():
        if (n := keep.budget.capacity(length)) < min(last, length):
            raise InputError(
                f"{method.id}: the last {last} of {length} tokens are the question and must stay, more than "
                f"the budget of {n} slots (budget={keep.budget.amount!r}): raise it, or lower question="
            )
    return last


def _question(batch: PaddedTokens, last: int, read: int) -> tuple[Array, Array] | None:
    """Take the last `last` tokens of rows with over `read` tokens, and how many; None if no row has more."""
    ahead = batch.lengths > read
    if not ahead.any():
        return None
    start = np.maximum(batch.lengths - last, 0)[:, None]
    index = np.minimum(start + np.arange(last), batch.tokens.shape[1] - 1)
    asked = np.take_along_axis(batch.tokens, index, axis=1)
    return jnp.asarray(asked), jnp.asarray(np.where(ahead, np.minimum(batch.lengths, last), 0), jnp.int32)


def _chunks(batch: PaddedTokens, chunk: int) -> list[PaddedTokens]:
    out = []
    for start in range(0, int(batch.lengths.max()), chunk):
        part = batch.tokens[:, start : start + chunk]
        part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
        out.append(PaddedTokens(part, np.clip(batch.lengths - start, 0, chunk).astype(np.int32)))
    return out
