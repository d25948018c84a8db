"""The public verbs on a model: prefill, step, generate.

Everything here runs on the host: it checks what was given, picks static sizes (buckets, capacities) and
calls the pure functions of `kvjax.steps`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.beams import search
from kvjax.cache import Cache, check_alive
from kvjax.errors import InputError
from kvjax.fit import check_budget
from kvjax.grammar import Method
from kvjax.inputs import (
    check_in_vocabulary,
    id_array,
    is_rows,
    one_token,
    prng_key,
    ragged_rows,
    stop_ids,
    whole_number,
)
from kvjax.methods import method as build_method
from kvjax.models.model import Model
from kvjax.not_numbers import check_scores, refuse_prompt, refuse_step
from kvjax.place.rows import fork
from kvjax.processors import Processor, history
from kvjax.pure import bind, decoding
from kvjax.samples import write
from kvjax.sampling import Sampler
from kvjax.segments import free_slots, reserve
from kvjax.steps import Run
from kvjax.stopping import StopStrings
from kvjax.verbs import Lengths, OneToken, TokenIds, has_verbs, refuse

# How many tokens a cache holds beyond its prompt, unless a call says otherwise.
ROOM = 128


def bucket(tokens: int) -> int:
    """Smallest static length that holds `tokens`: exact to 16 below 64, to an eighth of the size above.

    >>> [bucket(n) for n in (5, 100, 512, 513, 4096)]
    [16, 104, 512, 576, 4096]
    """
    if tokens <= 64:
        return max(16, -(-tokens // 16) * 16)
    unit = 2 ** ((tokens - 1).bit_length() - 4)
    return -(-tokens // unit) * unit


_free_slots = jax.jit(free_slots, static_argnums=0)


class Batch(NamedTuple):
    """Right-padded tokens on the host, with their lengths."""

    tokens: np.ndarray
    lengths: np.ndarray


def padded(model: Model, tokens: TokenIds, lengths: Lengths | None, least: int = 1) -> Batch:
    """Checks and pads a prompt; InputError for what the model cannot take, or rows of fewer than `least`."""
    if is_rows(tokens):
        if lengths is not None:
            raise InputError(
                "lengths= goes with a padded array of tokens; a list of lists has its own lengths"
            )
        rows = ragged_rows(tokens)
        length = np.array([len(r) for r in rows])
        array = np.zeros((len(rows), max(length, default=0)), np.int64)
        for i, row in enumerate(rows):
            array[i, : len(row)] = row
    else:
        array = id_array("tokens", tokens)
        if array.ndim != 2:
            raise InputError(
                f"tokens must be [B, T] or a list of lists of token ids, got shape {array.shape}: "
                "wrap a single prompt as [[...]]"
            )
        length = np.full(array.shape[0], array.shape[1]) if lengths is None else id_array("lengths", lengths)
    if length.shape != array.shape[:1] or (length > array.shape[1]).any():
        raise InputError(f"lengths must be [B] and at most T = {array.shape[1]}, got {length.tolist()}")
    if not len(array) or (length < least).any():
        raise InputError("every row needs at least one token; a prompt here is empty")
    check_in_vocabulary(array[np.arange(array.shape[1]) < length[:, None]], model.config.vocab)
    size = bucket(array.shape[1])
    ids = np.zeros((array.shape[0], size), np.int32)
    ids[:, : array.shape[1]] = np.where(np.arange(array.shape[1]) < length[:, None], array, 0)
    return Batch(ids, length.astype(np.int32))


def check_cache(model: Model, cache: Cache) -> None:
    """InputError for what is no cache, or one that another model filled, or that a step consumed."""
    if not isinstance(cache, Cache):
        given = f"{cache!r}" if isinstance(cache, str | os.PathLike) else f"a {type(cache).__name__}"
        raise InputError(
            f"cache is {given}, expected a kvjax.cache.Cache: give the `.cache` of what generate returned, "
            "the second of what prefill and step return, or kvjax.load_cache(path)"
        )
    check_alive(cache)
    if cache.model and cache.model != model.fingerprint:
        raise InputError(
            f"this cache was filled by another model (fingerprint {cache.model}, this model's is "
            f"{model.fingerprint}): load the model it was made with, or prefill again"
        )


def bare_cache(cache: Cache) -> Cache:
    """The cache without its labels, so that programs are shared by everything of the same layout."""
    return dataclasses.replace(cache, method=None, model="")


def labelled(cache: Cache, method: Method, model: Model) -> Cache:
    return dataclasses.replace(cache, method=method, model=model.fingerprint)


def prefill(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    room: int = ROOM,
    chunk: int | None = None,
    compress: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads a prompt: logits [B, V] at each row's last token, and the (compressed) cache.

    tokens: [B, T] with right padding and `lengths` [B], or a list of lists. With cache=, the tokens
    continue it and its method applies. room: how many further tokens the cache must hold. chunk: read that
    many tokens at a time, compressing after each. compress=False stores the new tokens and evicts nothing.
    implementation: of attention and recurrences, "reference", "tpu" or "gpu"; None takes kernels where they
    can run.

    InputError for token ids outside the vocabulary, empty or too long prompts, a foreign cache, or one of
    another number of rows, a `room` beyond the model's positions, or scores that are not numbers;
    NotImplementedError where a forced kernel cannot run.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> logits, cache = kvjax.prefill(model, [[1, 2, 3]], room=8)
    >>> logits.shape, len(kvjax.kept_positions(cache))
    ((1, 220), 4)
    """
    if has_verbs(model):
        options = {"cache=": cache is not None, "chunk=": chunk is not None, "compress=False": not compress}
        refuse(model, options | {"implementation=": implementation is not None})
        return model.prefill(tokens, method=method, lengths=lengths, room=room)
    room = check_room(model, room)
    if chunk is not None:
        chunk = whole_number("chunk", chunk, 1, "tokens read at a time")
    batch = padded(model, tokens, lengths)
    chosen = method_of(model, method, cache)
    if cache is not None and cache.next.shape != batch.lengths.shape:
        raise InputError(
            f"the tokens have {len(batch.lengths)} rows, the cache {cache.next.shape[0]}, expected the same "
            "number: give tokens for every row of the cache, or copy its rows with kvjax.fork"
        )
    before = np.zeros(1, np.int32) if cache is None else np.asarray(cache.next)
    seen, last = int(before.max()), int(before.max() + batch.lengths.max())
    check_reach(model, last)
    if compress:
        first = batch.lengths if chunk is None else np.minimum(batch.lengths, chunk)
        check_budget(chosen, [*(before + first), *(before + batch.lengths)])
    run = Run(model.config, bind(chosen, model), implementation)
    pieces = _chunks(batch, chunk)
    logits, lost = None, []
    for piece in pieces:
        width = piece.tokens.shape[1]
        spare = room if piece is pieces[-1] else width
        if cache is not None:
            cache = _with_room(run, model, cache, width + spare)
        here, cache, unranked = steps.prefill(
            run, model.params, jnp.asarray(piece.tokens), jnp.asarray(piece.lengths),
            None if cache is None else bare_cache(cache),
            tokens_bound=bucket(seen + width) if seen else width, room=spare, compress=compress,
            watched=True,
        )  # fmt: skip
        lost.append(unranked)
        # A row that ended in an earlier chunk keeps the logits of its own last token.
        logits = here if logits is None else jnp.where((piece.lengths > 0)[:, None], here, logits)
        seen += width
    assert logits is not None and cache is not None
    check_scores(chosen.id, np.any(jax.device_get(lost), 0))
    return logits, labelled(cache, chosen, model)


def check_room(model: Model, room: int) -> int:
    """`room` as an int; InputError unless it is a number of tokens that the model's positions allow."""
    return whole_number("room", room, 0, "further tokens", max(ROOM, model.config.max_positions))


def check_reach(model: Model, last: int) -> None:
    """InputError for a prompt that reaches beyond the model's positions."""
    if last > model.config.max_positions:
        raise InputError(
            f"the prompt reaches position {last}, this model's last is {model.config.max_positions}: "
            "shorten the prompt, or use a model with a longer context"
        )


def method_of(model: Model, method: Method | str | None, cache: Cache | None) -> Method:
    """The method of a prefill: the given one, or that of the cache it continues."""
    given = build_method(method) if isinstance(method, str) else method
    if cache is None:
        return given or Method()
    check_cache(model, cache)
    if given not in (None, cache.method):
        raise InputError(
            f"method {given.id!r} and a cache filled by {cache.method.id!r} were both given: "
            "a cache continues with its own method; leave method= out"
        )
    return cache.method or Method()


def _chunks(batch: Batch, chunk: int | None) -> list[Batch]:
    if chunk is None or chunk >= batch.tokens.shape[1]:
        return [batch]
    out = []
    for start in range(0, int(batch.lengths.max()), chunk):
        part = batch.tokens[:, start : start + chunk]
        part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
        out.append(Batch(part, np.clip(batch.lengths - start, 0, chunk).astype(np.int32)))
    return out


def _with_room(run: Run, model: Model, cache: Cache, tokens: int) -> Cache:
    """The cache with free slots for `tokens` more tokens in every row; grows by whole buckets."""
    gms = run.groups(model.params)
    short = tokens - int(np.asarray(_free_slots(gms, bare_cache(cache))).min())
    return cache if short <= 0 else reserve(gms, cache, bucket(short))


def step(
    model: Model,
    cache: Cache,
    token: OneToken,
    *,
    append: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """One token per row: logits [B, V] and the cache that holds it. The given cache is consumed (donated).

    token: one id per row. Ids on the host (NumPy, lists) must be in the vocabulary; of an array on a device
    only dtype and shape are checked, because to read it would make every step wait for the one before.

    append=False asks the last token again at its own position over the cache as it is, which stays usable.
    implementation: as in `prefill`. InputError when the cache has no room left, was consumed before, or
    belongs to another model, and beyond the model's last position.
    """
    if has_verbs(model):
        refuse(model, {"append=False": not append, "implementation=": implementation is not None})
        return model.step(cache, token)
    check_cache(model, cache)
    run = decoding(model.config, cache.method, implementation)
    ids = one_token(token, cache.next.shape[0], model.config.vocab)
    spare = cache.spare
    if append and spare < 1:
        spare = int(np.asarray(_free_slots(run.groups(model.params), bare_cache(cache))).min())
        if spare < 1:
            raise InputError(
                "the cache is full: give prefill(..., room=) the number of tokens you will add, "
                "or call prefill(model, tokens, cache=cache, room=...), which makes room"
            )
        spare = min(spare, positions_left(model, cache))
    call = steps.step if append else steps.step_keeping
    logits, new = call(run, model.params, bare_cache(cache), ids, np.full(ids.shape, append))
    return logits, dataclasses.replace(
        new, method=cache.method, model=model.fingerprint, spare=spare - append
    )


def positions_left(model: Model, cache: Cache) -> int:
    """How many more tokens the cache's longest row can take; InputError where there are none."""
    left = model.config.max_positions - int(np.asarray(cache.next).max())
    if left < 1:
        raise InputError(
            f"the cache stands at this model's last position, {model.config.max_positions}: start again with "
            "a shorter text, or use a model with a longer context"
        )
    return left


def _stepping(
    model: Model, method: Method | None, implementation: str | None
) -> Callable[[Cache, Array, Array], tuple[Array, Cache]]:
    """`Verbs.stepping` of any model."""
    if has_verbs(model):
        return model.stepping(method)
    return partial(steps.step, decoding(model.config, method, implementation), model.params)


# --- generation --------------------------------------------------------------------------------------


class Generated(NamedTuple):
    """tokens [R, max_new_tokens] (-1 after a row's stop token), their logprobs, and the cache behind them.

    R = B, or B * samples, or B * beams: rows[r] is the prompt of row r, scores[r] its summed logprobs. Rows
    of one prompt are neighbours, beams the best first.
    """

    tokens: Int[Array, "R M"]
    logprobs: Float[Array, "R M"]
    cache: Cache
    scores: Float[Array, "R"]
    rows: Int[np.ndarray, "R"]


def generate(
    model: Model,
    tokens: TokenIds,
    *,
    method: Method | str | None = None,
    cache: Cache | None = None,
    lengths: Lengths | None = None,
    max_new_tokens: int = 64,
    sampler: Sampler | None = None,
    processors: Sequence[Processor] = (),
    stop: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    samples: int = 1,
    beams: int = 1,
    key: Array | None = None,
    chunk: int | None = None,
    on_token: Callable[[int, np.ndarray], None] | None = None,
    implementation: str | None = None,
) -> Generated:
    """Reads a prompt and writes up to `max_new_tokens` tokens per row.

    Every written token, a stop token included, is in the returned cache, so a conversation goes on with
    generate(model, more_tokens, cache=out.cache). stop defaults to the checkpoint's stop ids; a row also ends
    with the token that completes one of stop_strings. processors: functions (logits [B, V], tokens so far
    [B, T] with -1 as padding) -> logits, applied in order; the tokens are this prompt's and the written ones.

    samples: how many texts to draw for each prompt, beams: how many to search for (the summed log-probability
    decides, whatever the length); either way a prompt is read once. on_token is called with (index,
    tokens [R]) as they come. key: one PRNG key; rows draw from their own fold of it. implementation: as in
    `prefill`.

    InputError for what `prefill` refuses, for another kind of max_new_tokens, stop or key, for more tokens
    than positions, for options that exclude each other, and where logits are not numbers (NaN), naming the
    step, or the layer for those of the prompt.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> out = kvjax.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=2, beams=3)
    >>> out.tokens.shape, out.rows.tolist(), bool(out.scores[0] >= out.scores[1])
    ((6, 2), [0, 0, 0, 1, 1, 1], True)
    """
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, "tokens")
    if max_new_tokens > max(ROOM, model.config.max_positions):
        raise InputError(
            f"{max_new_tokens} new tokens would reach beyond this model's last position, "
            f"{model.config.max_positions}: lower max_new_tokens"
        )
    root = jax.random.key(0) if key is None else prng_key(key)
    stops = jnp.asarray(stop_ids(model.stop_ids if stop is None else stop) or [-1], jnp.int32)
    sampler, processors = sampler or Sampler(), tuple(processors)
    _check_writing(samples, beams, sampler, stop_strings, on_token)
    logits, cache = prefill(
        model, tokens, method=method, cache=cache, lengths=lengths, room=max_new_tokens, chunk=chunk,
        implementation=implementation,
    )  # fmt: skip
    longest = int(np.asarray(cache.next).max()) + max_new_tokens
    if longest > model.config.max_positions:
        raise InputError(
            f"{max_new_tokens} new tokens would reach position {longest}, this model's last is "
            f"{model.config.max_positions}: lower max_new_tokens"
        )
    chosen, state, copies = cache.method, bare_cache(cache), max(samples, beams)
    rows = np.repeat(np.arange(logits.shape[0]), copies)
    if copies > 1:
        logits, state = logits[rows], fork(state, copies)

    def refuse_nan(at: int) -> None:
        if at == 0:
            refuse_prompt(model, *padded(model, tokens, lengths))
        refuse_step(at, chosen.id)

    loop: dict[str, Any] = dict(
        new=max_new_tokens,
        stop=stops,
        refuse_nan=refuse_nan,
        processors=processors,
        past=_past(model, tokens, lengths, max_new_tokens)[rows] if processors else None,
    )
    advance = _stepping(model, chosen, implementation)
    if beams > 1:
        found, state = search(advance, logits, state, beams=beams, **loop)
        written, logprobs = (x.reshape(len(rows), -1) for x in (found.tokens, found.logprobs))
        scores = found.scores.reshape(-1)
    else:
        ends = StopStrings(model, stop_strings, len(rows)) if stop_strings else None
        written, logprobs, state = write(
            advance, logits, state, sampler=sampler, key=root, ends=ends, on_token=on_token, **loop
        )
        scores = logprobs.sum(-1)
    return Generated(written, logprobs, labelled(state, chosen, model), scores, rows)


def _past(model: Model, tokens: TokenIds, lengths: Lengths | None, new: int) -> Int[Array, "B S"]:
    """The tokens so far, as processors see them."""
    batch = padded(model, tokens, lengths)
    return history(jnp.asarray(batch.tokens), jnp.asarray(batch.lengths), new)


def _check_writing(
    samples: int, beams: int, sampler: Sampler, stop_strings: Sequence[str], on_token: object
) -> None:
    """InputError for numbers of texts that mean nothing, and for options that exclude each other."""
    whole_number("samples", samples, 1, "texts of each prompt")
    whole_number("beams", beams, 1, "texts to search for")
    if samples > 1 and sampler.temperature == 0:
        raise InputError(
            f"samples={samples} was given at temperature 0, expected a draw: add sampler=kvjax.Sampler(1.0)"
        )
    others = {
        "samples=": samples > 1,
        "a sampler": sampler != Sampler(),
        "stop_strings=": bool(stop_strings),
        "on_token=": on_token is not None,
    }
    if beams > 1 and (given := [name for name, asked in others.items() if asked]):
        raise InputError(
            f"beams={beams} was given with {' and '.join(given)}: beams are searched, not drawn, and known "
            "at the end; leave one of them out"
        )
