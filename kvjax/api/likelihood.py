"""How likely texts are to a model that holds their beginning in a compressed cache: `likelihood`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.api.nan_checks import refuse_prompt, refuse_step
from kvjax.api.prefill import Batch, bare_cache, check_reach, method_of, padded, prefill
from kvjax.api.prepare import made
from kvjax.api.step import stepping
from kvjax.api.types import Lengths, Step, TokenIds, has_verbs
from kvjax.api.verify import one_pass_refused, verify
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.when import PREFILL_END
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import decoding
from kvjax.state.cache import Cache

# Tokens that are scored at a time.
PIECE = 128


class Likelihood(NamedTuple):
    """log p of every token after the context, in nats, given all tokens before it.

    logprobs: NaN where nothing was scored, in the context and after a row's end. tokens: how many of each
    row were scored. bytes: UTF-8 bytes of their text, all rows together; None without a tokenizer.
    """

    logprobs: Float[np.ndarray, "B T"]
    tokens: Int[np.ndarray, "B"]
    bytes: int | None

    @property
    def nll(self) -> float:
        """The mean of -log p over all tokens that were scored, in nats."""
        return -float(np.nansum(self.logprobs)) / int(self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p over all tokens that were scored."""
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
    context: int | None = None,
    chunk: int | None = None,
    lengths: Lengths | None = None,
    implementation: str | None = None,
) -> Likelihood:
    """How likely the model, with a past that a method compresses, finds the tokens of texts.

    The first `context` tokens of every text (1 by default) are read as a prompt. The others are scored one
    after the other, each over the cache of all tokens before it, as in decoding; the first one by the logits
    of the prompt, as in `generate`.

    texts: strings, or token ids as in `prefill` (with `lengths` where they are padded). chunk: read `chunk`
    tokens of the context at a time, and compress again after every `chunk` scored tokens, for methods that
    act only at the ends of prompts; then all texts must have one length. implementation: as
    in `prefill`.

    Raises InputError for what `prefill` refuses, for texts without a token after the context, for strings
    without a tokenizer, where a method acts at the ends of prompts and neither context nor chunk is given,
    and where logits are not numbers (NaN).

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> found = kvjax.likelihood(model, [[*range(3, 19)]], method="snapkv(budget=0.5, window=2)", context=8)
    >>> found.tokens.tolist(), round(found.perplexity) > 1
    ([8], True)
    """
    has_verbs(model)
    chosen = method_of(model, method, None)
    batch = padded(model, _encoded(model, texts), lengths)
    start = _start(chosen, context, chunk)
    if (short := batch.lengths <= start).any():
        raise InputError(
            f"row {int(short.argmax())} has {int(batch.lengths[short][0])} tokens, expected more than the "
            f"context of {start}: lower context=, or leave the row out"
        )
    if chunk is not None and len({*batch.lengths.tolist()}) > 1:
        raise InputError("chunk= goes with texts of one length, in tokens: cut them, or give them one by one")
    text_model = model
    model = made(model, chosen)
    check_reach(model, int(batch.lengths.max()), chosen)
    logits, cache = prefill(
        model, batch.tokens[:, :start], method=chosen, room=int(batch.lengths.max()) - start,
        chunk=None if chunk is None else min(chunk, start), **_forced(implementation),
    )  # fmt: skip
    if np.isnan(fetch(logits)).any():
        refuse_prompt(model, batch.tokens[:, :start], np.full(len(batch.lengths), start))
    first = fetch(_of_targets(logits[:, None], jnp.asarray(batch.tokens[:, start : start + 1])))
    behind = _scored(model, chosen, cache, batch, start, chunk, implementation)
    found = np.full((len(batch.lengths), int(batch.lengths.max())), np.nan, np.float32)
    found[:, start:] = np.concatenate([first, behind], 1)[:, : found.shape[1] - start]
    found[np.arange(found.shape[1]) >= batch.lengths[:, None]] = np.nan
    if (
        wrong := np.isnan(found[:, start:]) & (np.arange(start, found.shape[1]) < batch.lengths[:, None])
    ).any():
        refuse_step(int(np.argwhere(wrong)[:, 1].min()), chosen.id)
    return Likelihood(found, batch.lengths - start, _bytes(text_model, batch, start))


def _forced(implementation: str | None) -> dict[str, Any]:
    # Models of two decoders know none.
    return {} if implementation is None else {"implementation": implementation}


def _start(method: Method, context: int | None, chunk: int | None) -> int:
    """How many tokens are read as a prompt; InputError where the method would then never act."""
    if chunk is not None:
        whole_number("chunk", chunk, 1, "tokens read at a time")
    if context is not None:
        return whole_number("context", context, 1, "tokens that are read as a prompt")
    keeps = [one.keep for one in method.sentences if one.keep is not None and one.keep.score is not None]
    if chunk is None and (method.reread is not None or any(keep.when == PREFILL_END for keep in keeps)):
        raise InputError(
            f"{method.id} acts at the ends of prompts, and without a context there is none: give context=, "
            "the number of tokens that are read as a prompt, or chunk="
        )
    return 1


def _encoded(model: Model, texts: Sequence[str] | TokenIds) -> TokenIds:
    """Token ids of strings; what are none is returned as it is."""
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


def _bytes(model: Model, batch: Batch, start: int) -> int | None:
    """The bytes of the text that was scored."""
    if (tokenizer := getattr(model, "tokenizer", None)) is None:
        return None
    rows = (row[start:length].tolist() for row, length in zip(batch.tokens, batch.lengths, strict=True))
    return sum(len(tokenizer.decode(row, skip_special_tokens=False).encode()) for row in rows)


# --- after the context ------------------------------------------------------------------------------------


def _scored(
    model: Model, method: Method, cache: Cache, batch: Batch, start: int, chunk: int | None,
    implementation: str | None,
) -> Float[np.ndarray, "B _"]:  # fmt: skip
    """log p of every token after the first scored one; values after a row's end mean nothing."""
    last, size, found = int(batch.lengths.max()) - 1, chunk or PIECE, []
    plain = not has_verbs(model)
    whole = decoding(model, method, implementation) if plain and chunk is None else None
    one, params = stepping(model, method, implementation)
    for at in range(start, last, size):
        tokens, targets = batch.tokens[:, at : at + size], batch.tokens[:, at + 1 : at + size + 1]
        width = min(size, last - at)
        tokens, targets = (np.pad(x[:, :width], ((0, 0), (0, size - width))) for x in (tokens, targets))
        count = np.clip(batch.lengths - 1 - at, 0, width)
        if whole is not None and not one_pass_refused(model, whole, cache, count):
            logits, cache = verify(
                model, cache, tokens[:, :width], lengths=count, implementation=implementation
            )
            found.append(fetch(_of_targets(logits, jnp.asarray(targets[:, :width]))))
            continue
        append = np.arange(size) < count[:, None]
        logprobs, stepped = _stepped(
            one, params, bare_cache(cache), *map(jnp.asarray, (tokens, append, targets))
        )
        found.append(fetch(logprobs)[:, :width])
        if chunk is None:
            cache = stepped
        elif at + size < last:
            _, cache = prefill(model, tokens, cache=cache, room=last - at - size, **_forced(implementation))
    return np.concatenate([np.zeros((len(batch.lengths), 0), np.float32), *found], 1)


@partial(jax.jit, static_argnames=("one",))
def _stepped(
    one: Step, params: Params, cache: Cache, tokens: Int[Array, "B F"], append: Bool[Array, "B F"],
    targets: Int[Array, "B F"],
) -> tuple[Float[Array, "B F"], Cache]:  # fmt: skip
    """log p of the targets, each after its token, read one by one, and the cache with these tokens."""

    def read(cache: Cache, given: tuple[Array, Array, Array]) -> tuple[Cache, Array]:
        token, append, target = given
        logits, cache = one(params, cache, token, append)
        return cache, _of_targets(logits[:, None], target[:, None])[:, 0]

    cache, found = jax.lax.scan(read, cache, (tokens.T, append.T, targets.T))
    return found.T, cache


@jax.jit
def _of_targets(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, targets[..., None].astype(jnp.int32), -1)[..., 0]
    return chosen - jax.nn.logsumexp(wide, -1)
