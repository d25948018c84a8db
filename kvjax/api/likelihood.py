"""Likelihood: how likely texts are to a model that reads their beginning into a compressed cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.chunks import bucket
from kvjax.api.forced import ForcedTokens, TargetScores, force, scored
from kvjax.api.nan_checks import refuse_prompt, refuse_step
from kvjax.api.prefill import PaddedTokens, check_reach, method_of, padded, prefill
from kvjax.api.prepare import made
from kvjax.api.types import Lengths, TokenIds, has_verbs
from kvjax.base.checks import id_array, whole_number
from kvjax.base.errors import InputError
from kvjax.compat.max_length import last_position
from kvjax.grammar import Method
from kvjax.grammar.when import PREFILL_END
from kvjax.hosts.arrays import fetch
from kvjax.models.clean_spaces import uncleaned
from kvjax.models.model import Model
from kvjax.state.cache import Cache, nbytes

# How many tokens are scored at a time.
PIECE = 128


class Likelihood(NamedTuple):
    """log p of every token after the context, in nats, given all tokens before it.

    logprobs: NaN for tokens that were not scored, in the context and after a row's end. tokens: how many of
    each row were scored. bytes: UTF-8 bytes of their text, over all rows; None without a tokenizer. greedy:
    whether a token is the likeliest one, False for tokens that were not scored. cache_bytes: bytes of the
    cache after the context, with free slots for the other tokens.
    """

    logprobs: Float[np.ndarray, "B T"]
    tokens: Int[np.ndarray, "B"]
    bytes: int | None
    greedy: Bool[np.ndarray, "B T"]
    cache_bytes: int

    @property
    def nll(self) -> float:
        """The mean of -log p over all tokens that were scored, in nats."""
        return -float(np.nansum(self.logprobs)) / int(self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """Perplexity: exp of the mean of -log p over all tokens that were scored."""
        return math.exp(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """-log2 p of all tokens that were scored, per byte of their text. InputError without a tokenizer."""
        if not self.bytes:
            raise InputError("the texts have no bytes, because the model has no tokenizer: use perplexity")
        return -float(np.nansum(self.logprobs)) / math.log(2) / self.bytes


def likelihood(
    model: Model,
    texts: Sequence[str] | TokenIds,
    *,
    method: Method | str | None = None,
    context: int | Sequence[int] | Int[np.ndarray, "B"] | None = None,
    chunk: int | None = None,
    lengths: Lengths | None = None,
    implementation: str | None = None,
) -> Likelihood:
    """Compute the likelihood of texts by a model, over a cache that a method compresses.

    The first tokens of every text are read as a prompt. The others are scored one after the other, over the
    cache of all tokens before them, as in decoding; the first of them with the logits of the prompt.

    Args:
        model: a model.
        texts: strings, or token ids as in `prefill`.
        method: a method, its text, or None for the full cache.
        context: how many tokens are read as a prompt, one number or one for each text; None is 1.
        chunk: reads so many tokens of the context at a time, and compresses again after as many scored
            tokens, for methods that act only at the ends of prompts; then all texts must have one length.
        lengths: tokens of each row [B], where rows are padded.
        implementation: as in `prefill`.

    Returns:
        A `Likelihood`: log p of every token [B, T] in nats, `perplexity`, and bytes of the cache.

    Raises:
        InputError: for what `prefill` refuses, texts without a token after the context, strings without a
            tokenizer, a method that acts at the ends of prompts where neither `context` nor `chunk` is given,
            and NaN in logits.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> found = kvjax.likelihood(model, [[*range(3, 19)]], method="snapkv(budget=0.5, window=2)", context=8)
    >>> found.tokens.tolist(), round(found.perplexity) > 1
    ([8], True)
    """
    has_verbs(model)
    chosen = method_of(model, method, None)
    batch = padded(model, _encoded(model, texts), lengths)
    starts = _starts(chosen, context, chunk, len(batch.lengths))
    if (short := batch.lengths <= starts).any():
        raise InputError(
            f"row {int(short.argmax())} has {int(batch.lengths[short][0])} tokens, expected more than the "
            f"context of {int(starts[short][0])}: lower context=, or leave the row out"
        )
    if chunk is not None and len({*zip(batch.lengths.tolist(), starts.tolist(), strict=True)}) > 1:
        raise InputError("chunk= goes with texts of one length, in tokens: cut them, or give them one by one")
    text_model = model
    model = made(model, chosen)
    # The last token of a text is scored and not read.
    check_reach(model, int(batch.lengths.max()) - 1, chosen)
    prompt, fed = batch.tokens[:, : starts.max()], _after(batch, starts)
    prompt = np.where(np.arange(prompt.shape[1]) < starts[:, None], prompt, 0)
    logits, cache = prefill(
        model, prompt, method=chosen, lengths=starts, room=room_for(model, chosen, int(fed.lengths.max())),
        chunk=None if chunk is None else min(chunk, int(starts.max())), **_forced(implementation),
    )  # fmt: skip
    if np.isnan(fetch(logits)).any():
        refuse_prompt(model, prompt, starts)
    held = nbytes(cache)
    logprobs, best = _scored(model, chosen, cache, fed, logits, chunk, implementation)
    if (wrong := np.isnan(logprobs) & (np.arange(logprobs.shape[1]) < fed.lengths[:, None])).any():
        refuse_step(int(np.argwhere(wrong)[:, 1].min()), chosen.id)
    found = np.full((len(starts), int(batch.lengths.max())), np.nan, np.float32)
    greedy = np.zeros(found.shape, bool)
    for row, (start, n) in enumerate(zip(starts, fed.lengths, strict=True)):
        found[row, start : start + n] = logprobs[row, :n]
        greedy[row, start : start + n] = best[row, :n] == fed.tokens[row, :n]
    return Likelihood(found, fed.lengths, _bytes(text_model, fed), greedy, held)


def room_for(model: Model, method: Method, tokens: int) -> int:
    """Room for so many tokens, rounded up so that texts of similar lengths share programs."""
    return max(tokens, min(bucket(tokens), last_position(method, model.config)))


def _after(batch: PaddedTokens, starts: Int[np.ndarray, "B"]) -> PaddedTokens:
    """Return the tokens after the context of each row, right-padded."""
    count = batch.lengths - starts
    at = np.minimum(starts[:, None] + np.arange(count.max()), batch.tokens.shape[1] - 1)
    tokens = np.take_along_axis(batch.tokens, at, axis=1)
    return PaddedTokens(np.where(np.arange(tokens.shape[1]) < count[:, None], tokens, 0), count)


def _forced(implementation: str | None) -> dict[str, Any]:
    # Models of two decoders have no such option.
    return {} if implementation is None else {"implementation": implementation}


def _starts(method: Method, context: Any, chunk: int | None, rows: int) -> Int[np.ndarray, "B"]:
    """How many tokens of each row are read as a prompt; InputError if the method would then never act."""
    if chunk is not None:
        whole_number("chunk", chunk, 1, "tokens read at a time")
    if context is not None and np.ndim(context):
        starts = id_array("context", context)
        if starts.shape != (rows,) or (starts < 1).any():
            raise InputError(
                f"context is {starts.tolist()}, expected a whole number >= 1 for each of the {rows} texts"
            )
        return starts.astype(np.int32)
    if context is not None:
        return np.full(
            rows, whole_number("context", context, 1, "tokens that are read as a prompt"), np.int32
        )
    if chunk is None and needs_context(method):
        raise InputError(
            f"{method.id} acts at the ends of prompts, and without a context there is none: give context=, "
            "the number of tokens that are read as a prompt, or chunk="
        )
    return np.full(rows, context or 1, np.int32)


def needs_context(method: Method) -> bool:
    """Whether a method acts in prompts alone, and so would not act if all tokens were scored."""
    keeps = [one.keep for one in method.sentences if one.keep is not None and one.keep.score is not None]
    reads = any(one.read_prompt is not None for one in method.sentences)
    return reads or method.reread is not None or any(keep.when == PREFILL_END for keep in keeps)


def _encoded(model: Model, texts: Sequence[str] | TokenIds) -> TokenIds:
    """Token ids of strings; anything else is returned unchanged."""
    if isinstance(texts, str):
        raise InputError("texts is one string, expected a list of them: write [text]")
    if isinstance(texts, np.ndarray | jax.Array) or not any(isinstance(one, str) for one in texts):
        return texts  # type: ignore[return-value]
    if getattr(model, "tokenizer", None) is None:
        raise InputError("texts are strings, and the model has no tokenizer: give token ids")
    if not all(isinstance(one, str) for one in texts):
        raise InputError("texts are strings and token ids, expected one of both")
    try:
        return [model.tokenizer.encode(text).ids for text in texts]  # type: ignore[union-attr]
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"texts hold what the tokenizer cannot read ({error}): give others") from error


def _bytes(model: Model, fed: PaddedTokens) -> int | None:
    """Count the UTF-8 bytes of the scored text."""
    if (tokenizer := getattr(model, "tokenizer", None)) is None:
        return None
    rows = (row[:length].tolist() for row, length in zip(fed.tokens, fed.lengths, strict=True))
    decode = uncleaned(tokenizer)
    return sum(len(decode(row).encode()) for row in rows)


def _scored(
    model: Model, method: Method, cache: Cache, fed: PaddedTokens, logits: Float[Array, "B V"],
    chunk: int | None, implementation: str | None,
) -> TargetScores:  # fmt: skip
    """Score all tokens after the context, and return that on the host; values after a row's end mean nothing.

    logits: those of the context, which score the first token.
    """
    last, size = int(fed.lengths.max()) - 1, chunk or PIECE
    found = [fetch(scored(logits[:, None], jnp.asarray(fed.tokens[:, :1])))]
    for at in range(0, last, size):
        width = min(size, last - at)
        tokens, targets = (
            np.pad(fed.tokens[:, i : i + width], ((0, 0), (0, size - width))) for i in (at, at + 1)
        )
        given = ForcedTokens(tokens, np.clip(fed.lengths - 1 - at, 0, width), targets)
        out = force(
            model, method, cache, given, logits, implementation=implementation, keep=chunk is not None
        )
        found.append(TargetScores(*(x[:, :width] for x in fetch(out.scored))))
        logits = out.logits
        if chunk is None:
            cache = out.cache
        elif at + size < last:
            room = last - at - size
            _, cache = prefill(model, tokens, cache=cache, room=room, **_forced(implementation))
    return TargetScores(*(np.concatenate(x, 1) for x in zip(*found, strict=True)))
